"""Client libraries as people install them, each in its own environment, against the router of a pair.

What each is asked to do is in ``inside/``, which is run by pytest of that environment and knows nothing of pdserve.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clients import ENV, MODEL, python_of, run_client
from support.processes import Pair

HERE = Path(__file__).parent
INSIDE = HERE / "inside"

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("package", ["openai", "anthropic", "langchain", "litellm", "ollama"])
def test_a_package(pair: Pair, package: str) -> None:
    run_inside(pair, package)


def test_lm_eval(pair: Pair, model_folder: Path) -> None:
    run_inside(pair, "lm_eval", "--model-folder", model_folder)


def run_inside(pair: Pair, package: str, *more: str | Path) -> None:
    own = ["-c", "/dev/null", "--rootdir", INSIDE, "--confcutdir", INSIDE, "-p", "no:cacheprovider", "-q"]
    ask = ["--url", pair.router.url, "--model", MODEL, *more]
    said = run_client([python_of(package), "-m", "pytest", *own, INSIDE / f"test_{package}.py", *ask], 1200)
    assert " passed" in said
    assert "skipped" not in said


def test_the_node_package(pair: Pair) -> None:
    said = run_client(["node", ENV / "node" / "openai_client.mjs", pair.router.url, MODEL])
    assert said.strip().endswith("all of it")
