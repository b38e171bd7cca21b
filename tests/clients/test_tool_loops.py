"""Client libraries that call a tool and answer from its result, plain and streamed, through the router of a pair.

The model follows a script. What each library does is in ``inside/``, as for ``test_packages.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.clients import ENV, run_client, run_inside
from support.processes import Pair, pd_pair
from support.scripted_model import scripted_args

MODEL = "scripted"


def call(tool: str, **arguments: Any) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


PARIS = call("get_weather", city="Paris")
OUTPUTS = {
    "weather in Paris": PARIS,
    "Think of Paris": f"<think>\nThe tool knows.\n</think>\n\n{PARIS}",
    "weather in Paris and Oslo": f"{PARIS}\n{call('get_weather', city='Oslo')}",
    "sun over Paris": "It is sunny in Paris.",
    "rain over Oslo": "It is sunny in Paris and wet in Oslo.",
    # Objects that libraries ask for by a tool. The checked one is refused, and asked for once more.
    "a town of France": call("Town", name="lyon", inhabitants=520000),
    "a town in parts": call("PartialTown", name="Lyon", inhabitants=520000),
    "a town that is checked": call("CheckedTown", name="lyon", inhabitants=520000),
    "begins with a capital": call("CheckedTown", name="Lyon", inhabitants=520000),
    "into a final answer": call("final_result", name="Lyon", inhabitants=520000),
}
"""Outputs by the end of the prompt: a question, or the result of a tool."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("scripted")
    with pd_pair(folder, "tcp", *scripted_args(folder, OUTPUTS)) as started:
        yield started
        assert started.decode.info()["disaggregation"]["received"]["done"] > 0
        started.assert_all_returned()


@pytest.mark.parametrize("package", ["openai", "langchain", "instructor", "pydantic_ai", "openai_agents"])
def test_a_package_answers_from_the_results_of_tools(scripted: Pair, package: str) -> None:
    run_inside(scripted, package, f"test_tools_{package}.py", MODEL)


def test_the_node_package_answers_from_the_results_of_tools(scripted: Pair) -> None:
    said = run_client(["node", ENV / "node" / "openai_tools.mjs", scripted.router.url, MODEL])
    assert said.strip().endswith("all of it")
