"""The admin key of a server that was given none.

Whoever merely reaches a server may not end or change it. So a server without ``--admin-key-file``, and without a single
key, whose holder is the admin, draws an admin key at its start. Only the user who runs it can read the file.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from .keys import KeyOptions, read_keys

log = logging.getLogger(__name__)

FILE_NAME = "admin-key"


def draw_own_admin_key(options: KeyOptions, run_dir: Path) -> None:
    """Write a new key into ``run_dir`` and log where it is; do nothing where ``options`` name an admin's.

    Raises ``KeyFileError`` and ``OSError``.
    """
    if read_keys(options).has_admin:
        return
    file = run_dir / FILE_NAME
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as output:
        output.write(secrets.token_urlsafe(32) + "\n")
    log.info("no --admin-key-file: orders that end or change this server need the key in %s", file)


def own_admin_key(run_dir: Path) -> str | None:
    """The key that was drawn there, None where none was."""
    try:
        return (run_dir / FILE_NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
