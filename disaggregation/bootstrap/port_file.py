"""How an instance's processes learn where its bootstrap server listens: it may have taken any free port."""

from __future__ import annotations

from pathlib import Path

_NAME = "bootstrap.port"


def announce_port(run_dir: Path, port: int) -> None:
    """Announce the port of the bootstrap server, which listens now."""
    unfinished = run_dir / f"{_NAME}.new"
    unfinished.write_text(str(port))
    unfinished.rename(run_dir / _NAME)


def announced_port(run_dir: Path) -> int | None:
    """Return the port of the bootstrap server, None before it listens."""
    try:
        return int((run_dir / _NAME).read_text())
    except FileNotFoundError:
        return None
