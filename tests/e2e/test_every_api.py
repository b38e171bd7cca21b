"""Every API through a router and a pair: what it counts as cached, and that no log has texts or arguments of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from support.endpoints import GENERATION_PATHS
from support.processes import Pair, pd_pair
from support.prompt_counts import READERS, Counted, last_of, streaming
from support.scripted_model import scripted_args

Json = dict[str, Any]
SECRET = "canary-4711"
"""Stands in prompts, tools and arguments."""
ARGUMENTS = re.compile(r'"(?:arguments|partial_json)": ?"([^"\\]*(?:\\.[^"\\]*)*)"')
PROMPT = f"Name a colour for the {SECRET}. " * 24
USER = {"role": "user", "content": PROMPT}
CALL = f'<tool_call>\n{{"name": "paint", "arguments": {json.dumps({"colour": SECRET})}}}\n</tool_call>'
FUNCTION = {"name": "paint", "description": SECRET, "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


class Asked(NamedTuple):
    """How a path is asked. ``four``: fields for four answers; None: the API has one. ``tools``: those of the API."""

    body: Json
    four: Json | None = None
    tools: Json | None = None


APIS = {
    "/generate": Asked({"text": PROMPT}, {"sampling_params": {"n": 4}}),
    "/v1/completions": Asked({"prompt": PROMPT, "max_tokens": 32}, {"n": 4}),
    "/v1/chat/completions": Asked({"messages": [USER]}, {"n": 4}, {"tools": [TOOL]}),
    "/completion": Asked({"prompt": PROMPT, "n_predict": 32}, {"n_cmpl": 4}),
    "/completions": Asked({"prompt": PROMPT, "n_predict": 32}, {"n_cmpl": 4}),
    "/api/generate": Asked({"prompt": PROMPT}),
    "/api/chat": Asked({"messages": [USER]}, None, {"tools": [TOOL]}),
    "/v1/messages": Asked(
        {"messages": [USER], "max_tokens": 200},
        None,
        {"tools": [{"name": "paint", "description": SECRET, "input_schema": {"type": "object"}}]},
    ),
    "/v1/responses": Asked({"input": PROMPT}, None, {"tools": [{"type": "function", **FUNCTION}]}),
}
CASES = [
    *((path, 1) for path in APIS),
    *((path, 4) for path, asked in APIS.items() if asked.four is not None),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("scripted")
    args = (*scripted_args(folder, {"Name a colour": CALL}), "--log-level", "debug")
    with pd_pair(folder, "tcp", *args, router_args=["--log-level", "debug"]) as started:
        yield started
        started.assert_all_returned()


def counted(pair: Pair, path: str, body: Json) -> Counted:
    """Ask a path, and return its counts: of several answers, those of the first one, which computes the prompt."""
    response = pair.router.post(path, body)
    assert response.status_code == 200, response.text
    found = READERS[path](last_of(path, response) if body["stream"] else response.json())
    return found._replace(cached=found.cached[0]) if isinstance(found.cached, list) else found


def test_every_path_that_generates_is_here() -> None:
    assert APIS.keys() == set(GENERATION_PATHS)


@pytest.mark.parametrize(("path", "answers"), CASES)
def test_a_repeated_prompt_counts_as_cached(pair: Pair, path: str, answers: int) -> None:
    asked = APIS[path]
    fields = asked.four or {} if answers > 1 else {}
    # A namespace of its own, in which nothing is cached.
    body = {**asked.body, **fields, "extra_key": f"{path} {answers}"}
    first = counted(pair, path, {**body, "stream": False})
    again = counted(pair, path, {**body, "stream": False})
    streamed = counted(pair, path, {**body, **streaming(path)})
    assert first.prompt == again.prompt == streamed.prompt > 200
    if again.cached is None:
        assert (first.cached, streamed.cached) == (None, None)
        return
    assert first.cached == 0
    assert again.cached == streamed.cached
    assert isinstance(again.cached, int)
    page = pair.prefill.info()["options"]["page_size"]
    assert first.prompt - 2 * page < again.cached < first.prompt
    assert again.cached % page == 0


def test_apis_with_the_same_prompt_count_it_alike(pair: Pair) -> None:
    def hit(path: str) -> Counted:
        body = {**APIS[path].body, "stream": False, "extra_key": f"alike {path}"}
        counted(pair, path, body)
        return counted(pair, path, body)

    assert hit("/generate") == hit("/v1/completions") == hit("/completion")
    chat = hit("/v1/chat/completions")
    assert chat == hit("/v1/messages") == hit("/v1/responses")
    assert chat.prompt == hit("/api/chat").prompt == hit("/api/generate").prompt


def test_a_prompt_that_llama_servers_client_wants_computed_is_not_cached(pair: Pair) -> None:
    body = {**APIS["/completion"].body, "cache_prompt": False, "stream": False}
    assert [counted(pair, "/completion", body).cached for _ in range(2)] == [0, 0]


def test_a_list_of_prompts_of_several_kinds_is_answered_by_a_pair(pair: Pair) -> None:
    ids = pair.router.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    prompts = [PROMPT, ids, {"prompt_string": PROMPT}, [*ids[:7], "x"], ["x", *ids]]
    answers = pair.router.post("/completion", {"prompt": prompts, "n_predict": 4, "return_tokens": True}).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3, 4]
    text = pair.router.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["tokens"]
    sizes = [*[len(ids)] * 3, 7 + len(text), len(text) + len(ids)]
    assert [answer["tokens_evaluated"] for answer in answers] == sizes
    assert answers[0]["content"] == answers[1]["content"] == answers[2]["content"] != ""
    assert all(answer["stop"] for answer in answers)


def test_no_log_has_texts_or_arguments_of_calls(pair: Pair) -> None:
    for path, asked in APIS.items():
        if asked.tools is None:
            continue
        for stream in (False, True):
            answer = pair.router.post(path, {**asked.body, **asked.tools, "stream": stream})
            assert answer.status_code == 200, answer.text
            # Streams tell arguments in pieces.
            assert SECRET in answer.text + "".join(ARGUMENTS.findall(answer.text))
    for server in (pair.router, pair.prefill, pair.decode):
        log = server.log()
        assert "/v1/messages" in log
        assert SECRET not in log
