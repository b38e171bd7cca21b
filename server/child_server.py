"""``python -m pdserve.server.child_server PARENT_PID``: an instance or a router of ``pdserve up``, which dies with it.

The options come from standard input as JSON. They may contain the API key, and every user of the host can read
arguments. The command line has parsed them, so this process needs no parser: that saves a tenth of a second of
processor time and some megabytes. A user's own ``pdserve server`` does not die with its parent, because it may outlive
the shell.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import sys
from dataclasses import fields
from typing import Any, Literal

import msgspec

from ..router.options import RouterOptions
from ..runtime.child import die_with_parent
from ..runtime.options import check_options
from .options import ServerOptions


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
    """Run what standard input says, and exit with its code. Die with the parent process."""
    die_with_parent(int(sys.argv[1]))
    child = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildServer)
    try:
        options = child.checked_options()
    except (ValueError, msgspec.ValidationError) as e:
        sys.exit(f"pdserve {child.command}: {e}")
    if isinstance(options, ServerOptions):
        from .instance import run_instance

        sys.exit(run_instance(options))
    from ..router.process import run_router

    sys.exit(run_router(options))


if __name__ == "__main__":
    main()
