"""How an instance's processes learn where its bootstrap server listens: it may have taken any free port."""

from __future__ import annotations

from pathlib import Path

_NAME = "bootstrap.port"


def announce_port(run_dir: Path, port: int) -> None:
    """Write the port of the bootstrap server, which listens now, to a file for the instance's other processes."""
    unfinished = run_dir / f"{_NAME}.new"
    unfinished.write_text(str(port))
    unfinished.rename(run_dir / _NAME)


def announced_port(run_dir: Path) -> int | None:
    """Return the port that ``announce_port`` has written to ``run_dir``; None before it has."""
    try:
        return int((run_dir / _NAME).read_text())
    except FileNotFoundError:
        return None
