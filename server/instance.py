"""``pdserve server``: one instance, until it is told to stop."""

from __future__ import annotations

from .options import ServerOptions
from .pinned_model import pin_model
from .supervisor import run_server


def run_instance(options: ServerOptions) -> int:
    """Run an instance. All its processes load the same commit of a hub model. Returns the exit code."""
    return run_server(options, pin_model)
