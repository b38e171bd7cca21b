"""``python -m pdserve.runtime.start MODULE SPEC``: runs the ``main`` of a child process's module.

Nothing but this is imported before the collector is out of the way and signals are left to the supervisor.
"""

from __future__ import annotations

from . import clean_start  # isort: skip  # noqa: F401

import sys
from importlib import import_module

from .gc_control import uncollected
from .signals import leave_signals_to_parent


def main() -> None:
    """Import the module that the first argument names, and run its ``main``, with the rest of the arguments.

    Signals that the parent acts on are ignored already during the import.
    """
    leave_signals_to_parent()
    with uncollected():
        module = import_module(sys.argv.pop(1))
    module.main()


if __name__ == "__main__":
    main()
