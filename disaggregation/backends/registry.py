"""Transfer backends by name. Only the chosen one is imported."""

from __future__ import annotations

from importlib import import_module

from ..errors import UnknownBackend
from .base import TransferBackend

BACKENDS = {
    "tcp": ("tcp", "TcpBackend"),
    "shm": ("shm", "ShmBackend"),
    "fake": ("fake", "FakeBackend"),
}


def make_backend(name: str, epoch: str, host: str) -> TransferBackend:
    """Backend ``name`` of the instance ``epoch``, reachable at ``host`` where it uses the network.

    Raises ``UnknownBackend``.
    """
    if name not in BACKENDS:
        raise UnknownBackend(f"no transfer backend {name!r}; there are {', '.join(BACKENDS)}")
    module, cls = BACKENDS[name]
    backend = getattr(import_module(f".{module}", __package__), cls)(epoch, host)
    assert isinstance(backend, TransferBackend)
    return backend
