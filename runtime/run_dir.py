"""Where an instance's processes keep their sockets and small files."""

from __future__ import annotations

import tempfile
from pathlib import Path

SOCKET_PATH_CHARS = 107
"""The longest name of a Unix socket."""
RUN_DIR_CHARS = len("/pdserve-4194304-abcdefgh/worker_events.ipc")
"""The longest path of an instance's socket, within the folder for temporary files."""
SHORT_FOLDER = Path("/tmp")


def run_dir_parent() -> Path:
    """Return the folder for temporary files (TMPDIR), or /tmp if Unix sockets don't fit into that.

    Cluster schedulers set TMPDIR to long paths.
    """
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) <= SOCKET_PATH_CHARS - RUN_DIR_CHARS else SHORT_FOLDER
