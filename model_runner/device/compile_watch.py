"""Notes the kernels that Triton compiles after the worker has said that it is ready.

Each of them stalls all streams for seconds, where a step takes milliseconds. The warm-up is meant to have compiled
every variant that a step can ask for (``warm_up.py``), so one that it left out is a bug.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

log = logging.getLogger(__name__)


class CompileWatch:
    """Counts compiled kernels from ``begin`` on. One thread: the one that launches them."""

    def __init__(self) -> None:
        self._count = 0

    def begin(self, device_type: str) -> None:
        """Count the kernels that Triton compiles in this process from now on; do nothing on a CPU or without Triton.

        ``device_type``: "cpu" or "cuda". Each compilation is also logged as a warning.
        """
        if device_type != "cuda" or importlib.util.find_spec("triton") is None:
            return
        # Imported here: it takes most of a second, and a CPU does without.
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self.note

    def take(self) -> int:
        """Return how many kernels were compiled since the last call, and start again at 0."""
        count, self._count = self._count, 0
        return count

    def note(self, *, key: str, fn: Any, **_more: Any) -> None:
        """Count one kernel, and log a warning about it.

        Triton calls this after it has compiled a kernel or read it from its disk cache.
        """
        self._count += 1
        log.warning("kernel %s was compiled while serving, which stalled all streams; variant %s", fn.name, key)
