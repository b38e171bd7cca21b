"""``python -m pdserve.runtime.start MODULE SPEC``: runs the ``main`` of a child process's module.

Nothing but this is imported before the collector is out of the way.
"""

from __future__ import annotations

import sys
from importlib import import_module

from .collector import uncollected


def main() -> None:
    """Become the process that the arguments name."""
    with uncollected():
        module = import_module(sys.argv.pop(1))
    module.main()


if __name__ == "__main__":
    main()
