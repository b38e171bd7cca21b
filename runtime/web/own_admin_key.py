"""The admin key of a server that was given none.

Reaching a server must not be enough to end or change it. So a server without ``--admin-key-file`` draws an admin key at
its start, unless it has a single key, which is the admin's. Only the user of the server can read the file.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..run_dir import run_dirs_of
from .keys import KeyOptions, read_keys

log = logging.getLogger(__name__)

FILE_NAME = "admin-key"


def draw_own_admin_key(options: KeyOptions, run_dir: Path) -> Path | None:
    """Draw an admin key, write it to a file in ``run_dir``, log the file's path, and return the path.

    Return None and do nothing if ``options`` give an admin key. Raises ``KeyFileError`` and ``OSError``.
    """
    if read_keys(options).has_admin:
        return None
    file = run_dir / FILE_NAME
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as output:
        output.write(secrets.token_urlsafe(32) + "\n")
    # A warning, so that it is shown at the log levels at which operators run servers.
    log.warning("no --admin-key-file: orders that end or change this server need the key in %s", file)
    return file


def own_admin_key(run_dir: Path) -> str | None:
    """Return the admin key that ``draw_own_admin_key`` wrote into ``run_dir``, None if there is none."""
    try:
        return (run_dir / FILE_NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None


def own_admin_key_file(pid: int) -> Path | None:
    """Return the file with the key that the server with process id ``pid`` drew, None if it drew none."""
    with suppress(OSError):  # it may end at this moment
        for run_dir in run_dirs_of(pid):
            if (file := run_dir / FILE_NAME).is_file():
                return file
    return None
