"""Remembers that a library can't be built, so that not every process spends a quarter of a minute to find out.

The note lies beside the place where the library would be. That place is of these sources, flags and this compiler, so
another compiler, or a new version of it, is tried.
"""

from __future__ import annotations

from pathlib import Path


class FailedBuild:
    """The note about a library, given by its path in the cache."""

    def __init__(self, library: Path) -> None:
        self._note = library.with_suffix(".failed")

    def recall(self) -> str | None:
        """Return the error message of the build that failed, or None if no failure is noted."""
        if not self._note.is_file():
            return None
        return self._note.read_text(encoding="utf-8", errors="replace")

    def remember(self, message: str) -> None:
        """Write down beside the library's path that the build failed, with its error message."""
        self._note.write_text(message, encoding="utf-8", errors="replace")

    def forget(self) -> None:
        """Remove the note of a failure, because the build succeeded; do nothing if there is none."""
        self._note.unlink(missing_ok=True)
