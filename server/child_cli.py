"""``python -m pdserve.server.child_cli PARENT_PID``: the command line, as a process that dies with its parent.

The words of the command line come from standard input as a JSON list. They may contain the API key, and every user of
the host can read arguments. Processes of ``pdserve up`` run under it. A user's own ``pdserve server`` does not, because
it may outlive the shell.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import sys

import msgspec

from ..runtime.child import die_with_parent
from .cli import app


def main() -> None:
    """Run the command line that standard input holds as JSON, and exit with its code. Die with the parent process."""
    die_with_parent(int(sys.argv[1]))
    words = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    sys.exit(app(words, result_action="return_value"))


if __name__ == "__main__":
    main()
