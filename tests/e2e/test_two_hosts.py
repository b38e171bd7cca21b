"""An instance with ranks on two hosts, which are network namespaces here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.hosts import inside, why_not
from support.import_path import with_inherited
from support.machine import limit
from support.tiny_model import tiny_args

pytestmark = pytest.mark.timeout(300)
TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "size"), [("cpu", 4), ("torch", 4)])
def test_two_hosts_answer_as_one(engine: str, size: int, tmp_path: Path) -> None:
    """The death of any rank, on either host, ends both by name; see ``support/two_hosts.py``."""
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    model = ",".join(tiny_args(tmp_path / "model"))
    argv = [*inside(), sys.executable, "-m", "support.two_hosts", model, engine, str(size), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": with_inherited(TESTS)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=limit(200), check=False)
    logs = "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    assert done.stdout.endswith("all as expected\n")
