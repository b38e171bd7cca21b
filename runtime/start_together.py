"""``python -m pdserve.runtime.start_together FD MODULE SPEC …``: runs the ``main`` of several child processes' modules.

Modules are imported once, one after another, and each process is forked as soon as its own is there. So processes that
need the same modules neither import them again nor have them in memory twice. This process has one thread, as threads
do not survive a fork.

Each process becomes a child of the supervisor, which is a subreaper (``adopt_orphans``): it is forked twice, and the
process in between ends at once. It writes its number in ``MODULE SPEC …`` and its pid to ``FD``. End of file on ``FD``
tells that all are started.
"""

from __future__ import annotations

from . import clean_start  # isort: skip  # noqa: F401

import os
import sys
import time
from importlib import import_module

from .gc_control import uncollected
from .hardening import prctl
from .signals import leave_signals_to_parent

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.0002
"""Time between two looks at whether the process in between has ended. It does nothing else."""


def adopt_orphans(yes: bool) -> None:
    """Make this process the parent of its descendants' orphans from now on (``yes``), or no longer."""
    prctl(PR_SET_CHILD_SUBREAPER, yes)


def fork_orphan() -> bool:
    """Fork twice, so that the new process becomes a child of the supervisor (the subreaper).

    Return True in the new process, and False in the calling one. The process in between has ended by then.
    """
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(POLL_SECONDS)
    return True


def main() -> None:
    """Start a process for each pair of a module and a spec's path in the arguments, and report its number and pid.

    The first argument is the descriptor to which these are written. Each process runs its module's ``main``. The spec's
    path is its argument.
    """
    leave_signals_to_parent()
    started, *words = sys.argv[1:]
    for number, (module, spec) in enumerate(zip(words[::2], words[1::2], strict=True)):
        with uncollected():
            process = import_module(module)
        if fork_orphan():
            with os.fdopen(int(started), "w") as report:
                report.write(f"{number} {os.getpid()}\n")
            sys.argv[1:] = [spec]
            process.main()
            return


if __name__ == "__main__":
    main()
