"""The admin key of servers that benchmarks and checks start and give orders to."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path


def admin_key(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Write a new admin key to a file in ``folder``. Return a client's headers with it, and the flags of a server.

    A server with these flags does everything else as one without keys.
    """
    key = secrets.token_urlsafe(32)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="admin-key-", delete=False) as file:  # its mode is 0600
        file.write(key)
    return {"authorization": f"Bearer {key}"}, ["--admin-key-file", file.name, "--cache-by-key=false"]
