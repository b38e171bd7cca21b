"""Warnings of key and secret files that others than their owner can read or write."""

from __future__ import annotations

import logging

from .trusted_path import exposure

log = logging.getLogger(__name__)

OPTIONS = (
    *("api_key_file", "admin_key_file", "cluster_secret_file"),
    *("hicache_storage_url_file", "hicache_storage_key_file"),
)


def warn_of_exposed_files(options: object) -> None:
    """Log a warning for each file with keys or secrets that ``options`` name and that other users can read or write."""
    for name in OPTIONS:
        path = getattr(options, name, None)
        if path is not None and (problem := exposure(path)):
            log.warning("--%s %s: %s", name.replace("_", "-"), path, problem)
