"""Remembers that a library can't be built, so that not every process spends a quarter of a minute to find out.

The note lies beside the place where the library would be, so other sources or flags have none. Its first line says
which compiler failed: another one, or a new version of it, is tried. Then comes what it said.
"""

from __future__ import annotations

import os
from pathlib import Path


class FailedBuild:
    """The note about ``library`` and ``compiler`` (paths)."""

    def __init__(self, library: Path, compiler: str) -> None:
        self._note = library.with_suffix(".failed")
        status = os.stat(compiler)
        self._compiler = f"{os.path.realpath(compiler)} {status.st_size} {status.st_mtime_ns}"

    def recall(self) -> str | None:
        """Return the message of this compiler's last failure, or None if it has not failed."""
        if not self._note.is_file():
            return None
        compiler, _, message = self._note.read_text(encoding="utf-8", errors="replace").partition("\n")
        return message if compiler == self._compiler else None

    def remember(self, message: str) -> None:
        """Record that the build failed with ``message``."""
        self._note.write_text(f"{self._compiler}\n{message}", encoding="utf-8", errors="replace")

    def forget(self) -> None:
        """Forget an earlier failure, since the build succeeded."""
        self._note.unlink(missing_ok=True)
