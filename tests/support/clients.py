"""Programs of others, in the environments that ``make test-clients`` made for them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .machine import limit
from .processes import Pair

ENV = Path(__file__).parents[2] / ".venv-clients"
MODEL = "smollm2"


def run_client(argv: list[str | Path], seconds: float = 600, cwd: Path | None = None, **env: str) -> str:
    """What a client's program prints; fails with all of it where it ends in an error.

    ``cwd``: for one that leaves files where it is run.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "*"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [str(word) for word in argv],
        env={**environment, **quiet, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit(seconds),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def python_of(name: str) -> Path:
    """The interpreter of one of the environments; fails where it is not there."""
    python = ENV / name / "bin" / "python"
    assert python.exists(), f"{python} is not there: run `make test-clients`"
    return python


def counters(pair: Pair) -> dict[str, int]:
    """What the decode's counters say, which clients of a pair are answered by."""
    return dict(pair.decode.info()["counters"])
