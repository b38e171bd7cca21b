"""Transfer backends by name. Only the chosen one is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ...errors import BackendUnavailable, UnknownBackend
from .base import TransferBackend

BACKENDS = {
    "tcp": ("tcp", "TcpBackend"),
    "shm": ("shm", "ShmBackend"),
    "nixl": ("nixl", "NixlBackend"),
    "mooncake": ("mooncake", "MooncakeBackend"),
    "cuda_ipc": ("cuda_ipc", "CudaIpcBackend"),
    "fake": ("fake", "FakeBackend"),
}


NEEDS = {
    "nixl": "pip install 'pdserve[nixl]'",
    "mooncake": "pip install 'pdserve[mooncake]' and, on Debian, apt-get install libibverbs1 librdmacm1 libnuma1",
    "cuda_ipc": "it needs an NVIDIA GPU and its driver; between instances of one host without one, use shm",
}
"""How to get what a backend needs beside pdserve itself."""

KEEPS_MEMORY = frozenset({"nixl", "mooncake"})
"""Those that register the pool's memory, as it is then, with a device or a library: pages that went back to the system
would come again as others, and peers write to those of before.
"""

MakeBackend = Callable[[str, str, int, str | None], TransferBackend]
"""Of an instance's epoch, the host and port to listen on, and the host where others reach it if that is another."""


def find_backend(name: str) -> MakeBackend:
    """What makes backend ``name``; raises ``UnknownBackend`` and ``BackendUnavailable``."""
    if name not in BACKENDS:
        raise UnknownBackend(f"no transfer backend {name!r}; there are {', '.join(BACKENDS)}")
    module, cls = BACKENDS[name]
    try:
        make: MakeBackend = getattr(import_module(f".{module}", __package__), cls)
    except ImportError as e:
        if name not in NEEDS:
            raise
        raise BackendUnavailable(f"the transfer backend {name} can't be loaded ({e}): {NEEDS[name]}") from e
    return make


def make_backend(name: str, epoch: str, host: str, port: int = 0, advertise_host: str | None = None) -> TransferBackend:
    """Backend ``name`` of the instance ``epoch``. The places matter where it uses the network; ``port`` 0 is any.

    Raises ``UnknownBackend`` and ``BackendUnavailable``.
    """
    backend = find_backend(name)(epoch, host, port, advertise_host)
    assert isinstance(backend, TransferBackend)
    return backend
