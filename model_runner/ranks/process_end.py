"""How a rank ends its process when another rank is gone: an instance lives with all of its ranks, or not at all."""

from __future__ import annotations

import logging
import os
import time
from typing import NoReturn

log = logging.getLogger(__name__)

WATCH_SECONDS = 30.0
"""Without a word for so long, a host is gone that no longer answers at all."""


def end_process(what: str, error: BaseException) -> NoReturn:
    """Log ``what`` and ``error``, and end this process at once with exit code 1, from any thread.

    The instance ends with it.
    """
    log.critical("%s; ending the process (%s)", what, error)
    logging.shutdown()
    os._exit(1)  # sys.exit would end this thread only


def end_after_watch(what: str, error: BaseException) -> NoReturn:
    """End this process because another rank's data did not come: log ``what`` and ``error``, and exit with code 1.

    It first waits a second for the watch thread to report a lost host instead.
    """
    time.sleep(1)
    end_process(what, error)


def gone(node: int, rank: int) -> str:
    """Return the error message for a lost host. ``node``: its ``--node-rank``. ``rank``: its first rank."""
    return f"--node-rank {node} of the instance is gone: rank {rank} has ended, or was silent for {WATCH_SECONDS:.0f} s"
