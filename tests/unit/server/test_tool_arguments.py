"""Arguments of calls are counted before they are parsed: those of one call, and of all calls of a body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.server.http.anthropic.schemas import MessagesBody
from pdserve.server.http.bodies import tool_fields
from pdserve.server.http.bodies.fields import Body
from pdserve.server.http.bodies.tool_fields import MAX_ARGUMENT_VALUES, MAX_TOOL_VALUES, values_in_text
from pdserve.server.http.errors import ApiError
from pdserve.server.http.ollama.schemas import OllamaChatBody
from pdserve.server.http.openai.schemas import ChatBody
from pdserve.server.http.parsing import validate
from pdserve.server.http.responses.schemas import ResponsesBody

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text('ab"\\,[{}]: \n', max_size=12)),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text('k"\\[,', max_size=4), inner, max_size=9),
    max_leaves=60,
)


def separators(value: Any) -> int:
    """Return how many commas and opening brackets JSON text of ``value`` has outside strings."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inner) - 1) + sum(map(separators, inner))


@given(JSON)
def test_separators_in_strings_do_not_count(value: Any) -> None:
    padded = [value, *["[,{"] * 40]  # beyond the few that are not looked at closely
    assert values_in_text(json.dumps(padded)) == separators(padded)
    assert values_in_text(json.dumps(padded, ensure_ascii=False)) == separators(padded)


@pytest.mark.parametrize("text", ['"', '"' + '\\"' * 200_000, '"\\', '["a", "b' + "\\\\" * 200_000, '"' * 200_001])
def test_strings_without_an_end_take_no_longer(text: str) -> None:
    assert values_in_text("[[," * 40 + text) == 120 + text.count("[") + text.count(",")


def chat(calls: list[dict[str, Any]]) -> tuple[type[Body], dict[str, Any]]:
    turns = [
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(call)}}
                for call in calls[i : i + 200]
            ],
        }
        for i in range(0, len(calls), 200)
    ]
    return ChatBody, {"messages": [{"role": "user", "content": "x"}, *turns]}


def responses(calls: list[dict[str, Any]]) -> tuple[type[Body], dict[str, Any]]:
    items = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": json.dumps(call)} for call in calls]
    return ResponsesBody, {"input": items}


def messages(calls: list[dict[str, Any]]) -> tuple[type[Body], dict[str, Any]]:
    uses = [{"type": "tool_use", "id": f"a{i}", "name": "f", "input": call} for i, call in enumerate(calls)]
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": uses}]
    return MessagesBody, {"model": "m", "max_tokens": 1, "messages": turns}


def ollama(calls: list[dict[str, Any]]) -> tuple[type[Body], dict[str, Any]]:
    turns = [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": call}} for call in calls[i : i + 200]],
        }
        for i in range(0, len(calls), 200)
    ]
    return OllamaChatBody, {"model": "m", "messages": [{"role": "user", "content": "x"}, *turns]}


def refusal(schema: type[Body], content: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as refused:
        validate(schema, content)
    assert refused.value.status == 400
    return str(refused.value)


APIS = pytest.mark.parametrize("api", [chat, responses, messages, ollama])


@APIS
def test_all_calls_of_a_body_have_a_limit_together(api) -> None:
    call = {"a": [[]] * 2000}
    most = MAX_ARGUMENT_VALUES // 4001
    validate(*api([call] * most))
    assert f"all calls hold more than {MAX_ARGUMENT_VALUES} values" in refusal(*api([call] * (most * 3)))


@APIS
def test_each_body_has_a_budget_of_its_own(api) -> None:
    for _ in range(3):
        validate(*api([{"a": [1] * 20_000}] * 4))


@pytest.mark.parametrize("api", [chat, responses])
def test_too_much_is_refused_before_it_is_parsed(api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_fields, "orjson", None)  # nothing may be parsed
    assert f"more than {MAX_TOOL_VALUES} values" in refusal(*api([{"a": [[[]]] * MAX_TOOL_VALUES}]))
    assert "too long" in refusal(*api([{"a": " " * (9 << 20)}]))


@APIS
def test_code_with_many_braces_is_no_matter(api) -> None:
    code = "if (a[1], b) { c(d, [e, {f}]); }\n" * 8_000
    body = validate(*api([{"path": "a.c", "content": code}] * 3))
    assert body is not None


def test_the_decoded_arguments_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    body = validate(*chat([{"city": "Rome"}]))
    item = validate(*responses([{"city": "Rome"}]))
    monkeypatch.setattr(tool_fields, "orjson", None)
    assert body.messages[1].tool_calls[0].decoded == item.input[0].decoded == {"city": "Rome"}
