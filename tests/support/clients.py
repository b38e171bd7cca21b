"""Programs of others, in the environments that ``make test-clients`` made for them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .machine import limit
from .processes import Pair

ENV = Path(__file__).parents[2] / ".venv-clients"
MODEL = "smollm2"
INSIDE = Path(__file__).parents[1] / "clients" / "inside"
"""Tests that run in the clients' own environments."""


def run_client(argv: list[str | Path], seconds: float = 600, cwd: Path | None = None, **env: str) -> str:
    """Run a client's program and return what it prints. An error exit fails the test with all of the output.

    ``cwd``: for a client that leaves files where it is run.
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
    """Return the interpreter of one of the environments. Fails if it is not there."""
    python = ENV / name / "bin" / "python"
    assert python.exists(), f"{python} is not there: run `make test-clients`"
    return python


def run_inside(pair: Pair, package: str, file: str, model: str, *more: str | Path) -> None:
    """Run a file of ``INSIDE`` against the router of ``pair``, by pytest of the environment of ``package``.

    ``more``: further options of the tests. Fails unless all of them passed.
    """
    own = ["-c", "/dev/null", "--rootdir", INSIDE, "--confcutdir", INSIDE, "-p", "no:cacheprovider", "-q"]
    ask = ["--url", pair.router.url, "--model", model, *more]
    said = run_client([python_of(package), "-m", "pytest", *own, INSIDE / file, *ask], 1200)
    assert " passed" in said
    assert "skipped" not in said


def counters(pair: Pair) -> dict[str, int]:
    """Return the counters of the decode, which answers the clients of a pair."""
    return dict(pair.decode.info()["counters"])
