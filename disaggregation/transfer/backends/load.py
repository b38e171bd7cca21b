"""Loads transfer backends of the registry by name. Only the chosen one is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ....runtime.transfer_backends import BACKENDS
from ...errors import BackendUnavailable, UnknownBackend
from .base import TransferBackend

MakeBackend = Callable[[str, str, int, str | None], TransferBackend]
"""Constructor of a backend. Arguments: the instance's epoch, the host and port to listen on, and the host at which
other instances reach it (None: the same host).
"""


def find_backend(name: str) -> MakeBackend:
    """Import the transfer backend ``name`` and return its constructor.

    Raises ``UnknownBackend``, or ``BackendUnavailable`` if a library is missing.
    """
    spec = BACKENDS.get(name)
    if spec is None:
        raise UnknownBackend(f"no transfer backend {name!r}; there are {', '.join(BACKENDS)}")
    module, class_name = spec.path.split(".")
    try:
        make: MakeBackend = getattr(import_module(f".{module}", __package__), class_name)
    except ImportError as e:
        if spec.needs is None:
            raise
        raise BackendUnavailable(f"the transfer backend {name} can't be loaded ({e}): {spec.needs}") from e
    return make


def make_backend(name: str, epoch: str, host: str, port: int = 0, advertise_host: str | None = None) -> TransferBackend:
    """Make the transfer backend ``name`` of the instance ``epoch``. Backends without a network ignore the addresses.

    It listens on ``host`` and ``port``; ``port`` 0 takes a free one. ``advertise_host``: address that peers are told,
    None for the one that it listens on. Raises ``UnknownBackend`` and ``BackendUnavailable``.
    """
    backend = find_backend(name)(epoch, host, port, advertise_host)
    assert isinstance(backend, TransferBackend)
    return backend
