"""The registry of stores of KV pages, which ``--hicache-storage-backend`` names.

To add one, write its class, and a function that opens it, in a file of this folder and add a line to ``STORES``. The
file is imported only when its store is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...runtime.cluster_secret import KeyRing
from .base import PageStore, StoreMisconfigured, StoreRequest
from .frame import Framing


class StoreSpec(NamedTuple):
    """One store."""

    path: str
    """Module of this folder, and function that opens the store."""
    example: str
    """A URL of such a store, for messages."""
    needs: str | None = None
    """What the store needs beside pdserve itself, and how to get it. None: it needs nothing."""


STORES = {
    "file": StoreSpec("file_store.open_file_store", "/var/cache/pdserve"),
    "redis": StoreSpec(
        "redis_store.open_redis_store",
        "redis://127.0.0.1:6379/0",
        needs="the redis client: pip install 'pdserve[redis]'",
    ),
}
"""Every store by its name, in the order of help texts."""

if TYPE_CHECKING:
    StoreName = str
else:
    StoreName = Literal[tuple(STORES)]
"""A name in ``STORES``. The command line shows and checks these choices; a type checker can't read them."""


def make_store(
    name: StoreName, url: str | None, page_bytes: int, limit: int, timeout: float, ring: KeyRing | None = None
) -> PageStore:
    """Make the store ``name`` at ``url``: a folder, or an address of Redis.

    ``limit`` is the maximum size of a folder in bytes, and ``timeout`` limits one wait in seconds. ``ring`` has the
    keys that pages are sealed with; without it, they have a checksum.

    Raises ``StoreMisconfigured``.
    """
    spec = STORES[name]
    if not url:
        raise StoreMisconfigured(f"--hicache-storage-backend {name} needs --hicache-storage-url, like {spec.example}")
    framing: Framing | None = None
    if ring is not None:
        from .sealed_frame import Sealed

        framing = Sealed(ring)
    module, function = spec.path.split(".")
    try:
        open_store: Callable[[StoreRequest], PageStore] = getattr(import_module(f".{module}", __package__), function)
    except ImportError as e:
        if spec.needs is None:
            raise
        raise StoreMisconfigured(f"--hicache-storage-backend {name} needs {spec.needs}") from e
    return open_store(StoreRequest(url, page_bytes, limit, timeout, framing))
