"""The scheduler process of an instance that takes part in hand-overs."""

from __future__ import annotations

import sys

from ..runtime.child import start_child
from ..scheduler.process import SchedulerProcess
from .kv_manager import KVManager


def main() -> None:
    """Entry point of the child process."""
    SchedulerProcess(start_child(sys.argv), KVManager).run()


if __name__ == "__main__":
    main()
