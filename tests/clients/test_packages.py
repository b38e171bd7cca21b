"""Client libraries as people install them, each in its own environment, against the router of a pair.

What each is asked to do is in ``inside/``, which is run by pytest of that environment and knows nothing of pdserve.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.clients import ENV, MODEL, python_of, run_client, run_inside
from support.processes import Pair

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("package", ["openai", "anthropic", "langchain", "litellm", "ollama"])
def test_a_package(pair: Pair, package: str) -> None:
    run_inside(pair, package, f"test_{package}.py", MODEL)


def test_the_example_of_openai(pair: Pair) -> None:
    example = Path(__file__).parents[2] / "examples" / "openai_client.py"
    model, whole, stream, counts = run_client([python_of("openai"), example, pair.router.url]).splitlines()
    assert model == f"model: {MODEL}"
    assert whole == "whole answer: The capital of France is Paris."
    assert re.match("stream: .*Rome", stream)
    # The second prompt has the first question and its answer as well.
    assert 40 < int(re.fullmatch(r"(\d+) prompt tokens, \d+ output tokens", counts)[1]) < 100


def test_lm_eval(pair: Pair, model_folder: Path) -> None:
    run_inside(pair, "lm_eval", "test_lm_eval.py", MODEL, "--model-folder", model_folder)


def test_the_node_package(pair: Pair) -> None:
    said = run_client(["node", ENV / "node" / "openai_client.mjs", pair.router.url, MODEL])
    assert said.strip().endswith("all of it")
