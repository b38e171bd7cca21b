"""The scheduler process of an instance that takes part in hand-overs."""

from __future__ import annotations

import sys

from ...runtime.child import start_child
from ...runtime.malloc import return_freed_memory
from ...scheduler.process import SchedulerProcess
from .kv_manager import KVManager


def main() -> None:
    """Entry point of the child process."""
    ctx = start_child(sys.argv)
    return_freed_memory()
    SchedulerProcess(ctx, KVManager).run()


if __name__ == "__main__":
    main()
