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


MakeBackend = Callable[[str, str, int, str | None], TransferBackend]
"""Of an instance's epoch, the host and port to listen on, and the host where others reach it if that is another."""


def find_backend(name: str) -> MakeBackend:
    """What makes backend ``name``; raises ``UnknownBackend``, and ``ImportError`` where it lacks something here."""
    if name not in BACKENDS:
        raise UnknownBackend(f"no transfer backend {name!r}; there are {', '.join(BACKENDS)}")
    module, cls = BACKENDS[name]
    make: MakeBackend = getattr(import_module(f".{module}", __package__), cls)
    return make


def make_backend(name: str, epoch: str, host: str, port: int = 0, advertise_host: str | None = None) -> TransferBackend:
    """Backend ``name`` of the instance ``epoch``. The places matter where it uses the network; ``port`` 0 is any.

    Raises ``UnknownBackend``.
    """
    backend = find_backend(name)(epoch, host, port, advertise_host)
    assert isinstance(backend, TransferBackend)
    return backend
