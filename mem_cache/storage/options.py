"""Options of the tiers behind the KV pool: host memory and a store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...runtime.cluster_secret import ClusterSecretError, read_key_ring
from ...runtime.options import opt, section
from ...runtime.trusted_path import read_secret
from ..options import CacheOptions
from .registry import StoreName


@section("Tiers of KV memory", order=50)
@dataclass(frozen=True, kw_only=True)
class TierOptions(CacheOptions):
    """Options of host memory and of the store behind the KV pool."""

    enable_hierarchical_cache: bool = opt(
        default=False,
        help="Keep computed prefixes in host memory as well, the second tier, when the KV pool has no room for them.",
    )
    hicache_ratio: float = opt(default=2.0, help="Size of the second tier as a multiple of the KV pool's.")
    hicache_size: float = opt(default=0.0, help="The same in GB; 0: as --hicache-ratio says.")
    hicache_folder: str | None = opt(
        default=None,
        help=(
            "Where the second tier's file lies, which has no name and goes with the server; default: where the "
            "system keeps temporary ones. It should be a disk, or memory that is free."
        ),
    )
    hicache_host_dtype: Literal["auto", "int8"] = opt(
        default="auto",
        help=(
            "How pages look in the second and third tier: as in the pool (auto), or rounded to int8, which takes "
            "about half the memory, and what comes back is no longer exactly what was computed."
        ),
    )
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = opt(
        default="write_through",
        help=(
            "When a page goes to the second tier: as soon as it is computed (write_through), when it was found for "
            "another request (write_through_selective), or when the pool gives it up (write_back)."
        ),
    )
    hicache_io_backend: Literal["kernel", "direct"] = opt(
        default="kernel",
        help="Accepted for SGLang's command lines: pages are copied by the processor here.",
    )
    hicache_storage_backend: StoreName | None = opt(
        default=None,
        help=(
            "A third tier behind it, which outlives the server and may be shared by several: file (a folder) or "
            "redis (Redis or Valkey)."
        ),
    )
    hicache_storage_url: str | None = opt(
        default=None,
        help=(
            "The folder, or redis://HOST:PORT/DB. Who may write to it is trusted, unless pages are sealed with a key."
        ),
    )
    hicache_storage_url_file: str | None = opt(
        default=None,
        help=(
            "A file that holds --hicache-storage-url, for one with a password: arguments can be read by other users."
        ),
    )
    hicache_storage_key_file: str | None = opt(
        default=None,
        help=(
            "File with a secret that stored pages are sealed with, the same for all instances that share the store; "
            "two lines while it changes. A page that was not written with it counts as not there. Pages are not "
            "encrypted."
        ),
    )
    hicache_storage_size: float = opt(
        default=10.0,
        help=(
            "Most GB that the folder's pages take together; the longest unused go. Redis has a limit of its own "
            "(maxmemory)."
        ),
    )
    hicache_storage_timeout: float = opt(
        default=2.0,
        help="Seconds of each wait for Redis. A store that fails three times in a row is left alone for a while.",
    )
    hicache_storage_prefetch_policy: Literal["auto", "best_effort", "wait_complete", "timeout"] = opt(
        default="auto",
        help=(
            "How long a request waits for the third tier, 10 s at most: while that is expected to be sooner than "
            "computing (auto), not at all (best_effort), until it has answered (wait_complete), or for 0.25 s and "
            "0.1 s more per 1,000 tokens (timeout)."
        ),
    )

    @property
    def storage_url(self) -> str | None:
        """What ``hicache_storage_url`` or its file says; raises ``OSError`` where that can't be read."""
        if self.hicache_storage_url_file is None:
            return self.hicache_storage_url
        return read_secret(self.hicache_storage_url_file).decode().strip()

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option."""
        if not (self.hicache_size >= 0 and math.isfinite(self.hicache_size)):
            yield f"--hicache-size is {self.hicache_size:g}: it is a number of GB, or 0 for --hicache-ratio"
        for name, value in (
            ("--hicache-ratio", self.hicache_ratio),
            ("--hicache-storage-size", self.hicache_storage_size),
            ("--hicache-storage-timeout", self.hicache_storage_timeout),
        ):
            if not (value > 0 and math.isfinite(value)):
                yield f"{name} is {value:g}: it must be above 0"
        if self.hicache_folder is not None and not Path(self.hicache_folder).is_dir():
            yield f"--hicache-folder {self.hicache_folder}: there is no such folder"
        yield from self._store_problems()
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            yield (
                "--enable-hierarchical-cache keeps cached prefixes, --disable-radix-cache has none: drop one of the two"
            )

    def _store_problems(self) -> Iterator[str]:
        if self.hicache_storage_backend is not None and not self.enable_hierarchical_cache:
            yield "--hicache-storage-backend is the third tier, behind the second: add --enable-hierarchical-cache"
        if self.hicache_storage_key_file is not None and self.hicache_storage_backend is None:
            yield "--hicache-storage-key-file is for pages in a store: add --hicache-storage-backend, or leave it out"
        try:
            read_key_ring("--hicache-storage-key-file", self.hicache_storage_key_file)
        except ClusterSecretError as e:
            yield str(e)
        if self.hicache_storage_url and self.hicache_storage_url_file:
            yield "--hicache-storage-url and --hicache-storage-url-file say the same: drop one of the two"
        try:
            url = self.storage_url
        except (OSError, ValueError) as e:
            yield f"--hicache-storage-url-file {self.hicache_storage_url_file}: {getattr(e, 'strerror', None) or e}"
        else:
            if self.hicache_storage_backend is not None and not url:
                yield "--hicache-storage-backend needs --hicache-storage-url: a folder, or redis://HOST:PORT/DB"
