"""Transfer backends by name. Only the chosen one is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ...errors import UnknownBackend
from .base import TransferBackend

BACKENDS = {
    "tcp": ("tcp", "TcpBackend"),
    "shm": ("shm", "ShmBackend"),
    "fake": ("fake", "FakeBackend"),
}


MakeBackend = Callable[[str, str], TransferBackend]
"""Of an instance's epoch and the host where it is reached."""


def find_backend(name: str) -> MakeBackend:
    """What makes backend ``name``; raises ``UnknownBackend``, and ``ImportError`` where it lacks something here."""
    if name not in BACKENDS:
        raise UnknownBackend(f"no transfer backend {name!r}; there are {', '.join(BACKENDS)}")
    module, cls = BACKENDS[name]
    make: MakeBackend = getattr(import_module(f".{module}", __package__), cls)
    return make


def make_backend(name: str, epoch: str, host: str) -> TransferBackend:
    """Backend ``name`` of the instance ``epoch``, reachable at ``host`` where it uses the network.

    Raises ``UnknownBackend``.
    """
    backend = find_backend(name)(epoch, host)
    assert isinstance(backend, TransferBackend)
    return backend
