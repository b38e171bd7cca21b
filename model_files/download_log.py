"""The hub library's progress bars as log lines, for the reasons that ``runtime/progress.py`` gives."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

from tqdm import tqdm

from ..runtime.progress import EVERY_SECONDS

log = logging.getLogger(__name__)


class DownloadLog(tqdm):  # type: ignore[misc]  # tqdm is not typed
    """A ``tqdm_class`` that counts as tqdm does, and logs where that would draw."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._logged_at = time.monotonic()
        kwargs |= {"file": io.StringIO(), "disable": False, "mininterval": EVERY_SECONDS}
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Log the progress in percent, in place of drawing it: once in ``EVERY_SECONDS`` at most.

        Nothing is logged at the end of a download, or while the pieces of a file are put together. ``msg`` and ``pos``
        are ignored. Always returns True.
        """
        now = time.monotonic()
        is_over = self.total and self.n >= self.total
        # Bytes are counted twice: as they come, and as they are put together.
        if self.total and not is_over and now - self._logged_at >= EVERY_SECONDS and "Reconstruct" not in self.desc:
            self._logged_at = now
            log.info("%s: %.0f %%", self.desc, 100 * self.n / self.total)
        return True
