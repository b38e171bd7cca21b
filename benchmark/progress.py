"""The progress bar: on a terminal only, and never more often than it can be seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .record import RequestRecord

# Drawing takes a millisecond or two, in which no chunk gets its time stamp. So it is drawn twice a second, and only
# when a request has just ended; the library's own refreshing thread would cut in anywhere.
REDRAW_SECONDS = 0.5


class ProgressView:
    """Counts finished requests, and shows them when ``console`` is a terminal."""

    def __init__(self, console: Console) -> None:
        self._is_shown = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            disable=not self._is_shown,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, failed="")
        self._failed = 0
        self._drawn = 0.0

    @contextmanager
    def showing(self, label: str, total: int | None) -> Iterator[None]:
        """Show the progress of one run in the block. ``total``: its number of requests; None: unknown."""
        self._failed = 0
        self._progress.reset(self._task, description=label, total=total, failed="")
        with self._progress:
            yield

    def advance(self, record: RequestRecord) -> None:
        """Count a finished request, and redraw the bar at most every ``REDRAW_SECONDS``.

        Does nothing without a terminal.
        """
        if not self._is_shown:
            return
        self._failed += record.error is not None
        self._progress.update(self._task, advance=1, failed=f"{self._failed} failed" if self._failed else "")
        if time.monotonic() - self._drawn > REDRAW_SECONDS:
            self._progress.refresh()
            self._drawn = time.monotonic()
