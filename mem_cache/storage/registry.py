"""Stores by name, imported only when chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ...runtime.cluster_secret import KeyRing
from .base import PageStore, StoreMisconfigured
from .frame import Framing

StoreName = Literal["file", "redis"]
INSTALL_REDIS = "--hicache-storage-backend redis needs the redis client: pip install 'pdserve[redis]'"


def make_store(
    name: StoreName, url: str | None, page_bytes: int, limit: int, timeout: float, ring: KeyRing | None = None
) -> PageStore:
    """Make the store ``name`` at ``url``: a folder, or an address of Redis.

    ``limit`` is the maximum size of a folder in bytes, and ``timeout`` limits one wait in seconds. ``ring`` has the
    keys that pages are sealed with; without it, they have a checksum.

    Raises ``StoreMisconfigured``.
    """
    if not url:
        example = "/var/cache/pdserve" if name == "file" else "redis://127.0.0.1:6379/0"
        raise StoreMisconfigured(f"--hicache-storage-backend {name} needs --hicache-storage-url, like {example}")
    framing: Framing | None = None
    if ring is not None:
        from .sealed_frame import Sealed

        framing = Sealed(ring)
    if name == "file":
        from .file_store import FileStore

        return FileStore(Path(url), page_bytes, limit, framing)
    try:
        from .redis_store import RedisStore
    except ImportError as e:
        raise StoreMisconfigured(INSTALL_REDIS) from e
    return RedisStore(url, page_bytes, timeout, framing)
