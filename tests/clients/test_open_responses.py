"""Open Responses' compliance requests through the router of a pair, with a model that follows a script.

``support/open_responses.py`` has the requests and the checks. The specification's own test of an image fails here.
The image is refused with a 400 that names the part, and the last check asks for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from support.open_responses import CHECKS
from support.processes import Pair, pd_pair
from support.scripted_model import scripted_args

CALL = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': {'city': 'Paris'}})}\n</tool_call>"
OUTPUTS = {"Name a colour": "<think>\nRed will do.\n</think>\n\nRed.", "weather in Paris right now": CALL}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("scripted")
    with pd_pair(folder, "tcp", *scripted_args(folder, OUTPUTS)) as started:
        yield started
        started.assert_all_returned()


@pytest.mark.parametrize("name", CHECKS)
def test_a_compliance_request_is_answered(scripted: Pair, name: str) -> None:
    faults = CHECKS[name](lambda body: scripted.router.post("/v1/responses", {"model": "scripted", **body}))
    assert faults == []
