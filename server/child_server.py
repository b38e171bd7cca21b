"""``python -m pdserve.server.child_server PARENT_PID [forks]``: an instance or a router of ``pdserve up``.

It dies with ``up``. A user's own ``pdserve server`` does not die with its parent, because it may outlive the shell. The
options come from standard input as JSON. They may contain the API key, and every user of the host can read arguments.
The command line has parsed them, so this process needs no parser: that saves a tenth of a second of processor time and
some megabytes.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import sys
from dataclasses import fields
from importlib import import_module
from typing import Any, Literal

import msgspec

from ..router.options import RouterOptions
from ..runtime.child import die_with_parent
from ..runtime.fork_server import ForkServer
from ..runtime.options import check_options
from .options import ServerOptions

INSTANCE, ROUTER = "pdserve.server.instance", "pdserve.router.process"
"""Modules that run an instance and a router. Only the one that is needed is imported."""
FORKS = "forks"


class ChildServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the process runs: ``pdserve COMMAND`` with these options, by the names of their fields."""

    command: Literal["server", "router"]
    options: dict[str, Any]

    @classmethod
    def of(cls, options: ServerOptions | RouterOptions) -> ChildServer:
        """Return the command that these options are of. Options with default values are left out."""
        command: Literal["server", "router"] = "server" if isinstance(options, ServerOptions) else "router"
        default = type(options)()
        given = {item.name: getattr(options, item.name) for item in fields(options)}
        return cls(command, {name: value for name, value in given.items() if value != getattr(default, name)})

    def typed_options(self) -> ServerOptions | RouterOptions:
        """Return the options, unchecked. Raises ``msgspec.ValidationError`` for an option of another type."""
        if self.command == "server":
            return msgspec.convert(self.options, ServerOptions)
        return msgspec.convert(self.options, RouterOptions)

    def checked_options(self) -> ServerOptions | RouterOptions:
        """Return the options. Raises ``msgspec.ValidationError``, or a ``ValueError`` for options that can't work."""
        options = self.typed_options()
        if isinstance(options, ServerOptions):
            check_options(options)
        else:
            options.check()
        return options


def main() -> None:
    """Run what standard input says, and exit with its code. Die with the parent process.

    With the argument ``FORKS``, the instance's processes are forked, as they need the modules that are here already.
    """
    die_with_parent(int(sys.argv[1]))
    # Before any key is in memory.
    fork_server = ForkServer.fork() if FORKS in sys.argv[2:] else None
    child = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildServer)
    try:
        options = child.checked_options()
    except (ValueError, msgspec.ValidationError) as e:
        sys.exit(f"pdserve {child.command}: {e}")
    if isinstance(options, ServerOptions):
        sys.exit(import_module(INSTANCE).run_instance(options, fork_server))
    sys.exit(import_module(ROUTER).run_router(options))


if __name__ == "__main__":
    main()
