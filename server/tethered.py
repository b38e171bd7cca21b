"""``python -m pdserve.server.tethered PARENT_PID COMMAND…``: the command line, as a process that dies with its parent.

What ``pdserve up`` starts runs under it. A user's own ``pdserve server`` doesn't: it may outlive the shell.
"""

from __future__ import annotations

import sys

from .child import die_with_parent
from .cli import app


def main() -> None:
    """Tie this process's life to its parent's, then run the command line."""
    die_with_parent(int(sys.argv[1]))
    sys.exit(app(sys.argv[2:], result_action="return_value"))


if __name__ == "__main__":
    main()
