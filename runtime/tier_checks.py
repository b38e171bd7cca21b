"""Refuses options of the tiers behind the KV pool, and of sessions, that can't work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from .cluster_secret import ClusterSecretError, read_key_ring
from .options import ServerOptions


def session_complaints(options: ServerOptions) -> Iterator[str]:
    """Yield a line for each wrong option of sessions, with what to write instead."""
    for flag, value in (
        ("--kv-sessions-ttl", options.kv_sessions_ttl),
        ("--kv-sessions-size", options.kv_sessions_size),
        ("--kv-sessions-quota", options.kv_sessions_quota),
    ):
        if not (value > 0 and math.isfinite(value)):
            yield f"{flag} is {value:g}: it must be above 0"
    if options.kv_sessions_dir is not None and not options.kv_sessions_dir:
        yield "--kv-sessions-dir is empty: name a folder, or leave it out"


def tier_complaints(options: ServerOptions) -> Iterator[str]:
    """Yield a line for each wrong option of tiers, with what to write instead."""
    if not (options.hicache_size >= 0 and math.isfinite(options.hicache_size)):
        yield f"--hicache-size is {options.hicache_size:g}: it is a number of GB, or 0 for --hicache-ratio"
    for flag, value in (
        ("--hicache-ratio", options.hicache_ratio),
        ("--hicache-storage-size", options.hicache_storage_size),
        ("--hicache-storage-timeout", options.hicache_storage_timeout),
    ):
        if not (value > 0 and math.isfinite(value)):
            yield f"{flag} is {value:g}: it must be above 0"
    if options.hicache_folder is not None and not Path(options.hicache_folder).is_dir():
        yield f"--hicache-folder {options.hicache_folder}: there is no such folder"
    if options.hicache_storage_backend is not None and not options.enable_hierarchical_cache:
        yield "--hicache-storage-backend is the third tier, behind the second: add --enable-hierarchical-cache"
    if options.hicache_storage_key_file is not None and options.hicache_storage_backend is None:
        yield "--hicache-storage-key-file is for pages in a store: add --hicache-storage-backend, or leave it out"
    try:
        read_key_ring("--hicache-storage-key-file", options.hicache_storage_key_file)
    except ClusterSecretError as e:
        yield str(e)
    if options.hicache_storage_url and options.hicache_storage_url_file:
        yield "--hicache-storage-url and --hicache-storage-url-file say the same: drop one of the two"
    try:
        url = options.storage_url
    except (OSError, ValueError) as e:
        yield f"--hicache-storage-url-file {options.hicache_storage_url_file}: {getattr(e, 'strerror', None) or e}"
    else:
        if options.hicache_storage_backend is not None and not url:
            yield "--hicache-storage-backend needs --hicache-storage-url: a folder, or redis://HOST:PORT/DB"
    if not options.enable_hierarchical_cache:
        return
    if options.disable_radix_cache:
        yield "--enable-hierarchical-cache keeps cached prefixes, --disable-radix-cache has none: drop one of the two"
    if options.nnodes > 1:
        yield (
            "--enable-hierarchical-cache with --nnodes above 1 is not there yet, as each host has a part of the KV: "
            "give the instance all of its ranks on one host (--nnodes 1)"
        )
