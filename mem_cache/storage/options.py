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
        help="Keep computed prefixes in host memory (the second tier) when they leave the KV pool.",
    )
    hicache_ratio: float = opt(default=2.0, help="Size of the second tier as a multiple of the KV pool.")
    hicache_size: float = opt(default=0.0, help="Size of the second tier in GB; 0: by --hicache-ratio.")
    hicache_folder: str | None = opt(
        default=None,
        help=(
            "Folder of the second tier's unnamed file: on a disk, or in memory that is free. Default: the system's "
            "folder for temporary files."
        ),
    )
    hicache_host_dtype: Literal["auto", "int8"] = opt(
        default="auto",
        help=(
            "Type of pages in the second and third tier. auto: as in the pool. int8: rounded, about half the size; "
            "restored pages are then not exactly those that were computed."
        ),
    )
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = opt(
        default="write_through",
        help=(
            "When a page is copied to the second tier: when computed (write_through), when found by another request "
            "(write_through_selective), or when evicted (write_back)."
        ),
    )
    hicache_io_backend: Literal["kernel", "direct"] = opt(
        default="kernel",
        help="Accepted for compatibility with SGLang: the processor copies pages.",
    )
    hicache_storage_backend: StoreName | None = opt(
        default=None,
        help="Third tier, which outlives the server and can be shared: file (a folder) or redis (Redis or Valkey).",
    )
    hicache_storage_url: str | None = opt(
        default=None,
        help=(
            "Folder, or redis://HOST:PORT/DB. Users with write access are trusted unless pages are sealed "
            "(--hicache-storage-key-file)."
        ),
    )
    hicache_storage_url_file: str | None = opt(
        default=None,
        help="File with --hicache-storage-url, for a URL with a password: other users can read arguments.",
    )
    hicache_storage_key_file: str | None = opt(
        default=None,
        help=(
            "File with a secret that seals stored pages, the same for all instances that share the store; two lines "
            "while it changes. Pages without a valid seal count as missing. Pages are not encrypted."
        ),
    )
    hicache_storage_size: float = opt(
        default=10.0,
        help=(
            "Maximum size of the folder's pages in GB; least recently used pages are removed. Redis has its own "
            "limit (maxmemory)."
        ),
    )
    hicache_storage_timeout: float = opt(
        default=2.0,
        help="Timeout of each Redis operation in seconds. A store that fails three times in a row is paused.",
    )
    hicache_storage_prefetch_policy: Literal["auto", "best_effort", "wait_complete", "timeout"] = opt(
        default="auto",
        help=(
            "How long a request waits for the third tier, at most 10 s. auto: while that is expected to be faster "
            "than computing. best_effort: not at all. wait_complete: until it has answered. timeout: 0.25 s, and "
            "0.1 s more per 1,000 tokens."
        ),
    )

    @property
    def storage_url(self) -> str | None:
        """Folder or URL of the store, from ``hicache_storage_url`` or the file with it; None if neither is set.

        Raises ``OSError`` if the file can't be read.
        """
        if self.hicache_storage_url_file is None:
            return self.hicache_storage_url
        return read_secret(self.hicache_storage_url_file).decode().strip()

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option of host memory and the store, with its value and what to do."""
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
