"""``pdserve server``: one instance, until it is told to stop."""

from __future__ import annotations

from ..runtime.fork_server import ForkServer
from .options import ServerOptions
from .pinned_model import pin_model
from .supervisor import run_server


def run_instance(options: ServerOptions, fork_server: ForkServer | None = None) -> int:
    """Run an instance until it is told to stop, and return the exit code. ``fork_server`` starts its processes.

    For a hub model, the commit is chosen once, so that all processes load the same files.
    """
    return run_server(options, pin_model, fork_server)
