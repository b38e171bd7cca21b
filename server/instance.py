"""``pdserve server``: one instance, until it is told to stop."""

from __future__ import annotations

from ..runtime.options import ServerOptions
from ..runtime.supervisor import run_server
from .pinned_model import pin_model


def run_instance(options: ServerOptions) -> int:
    """Run an instance. All its processes load the same commit of a hub model. Returns the exit code."""
    return run_server(options, pin_model)
