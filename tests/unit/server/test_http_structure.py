"""What each API's fields of structured output come to, and which combinations are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.messages.grammar import MAX_GRAMMAR_CHARACTERS, Grammar

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
USER = {"role": "user", "content": "A number?"}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
LONG_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"description": "é" * (MAX_GRAMMAR_CHARACTERS // 2)}}}
    for name in "ab"
]
QWEN = 'tools <tool_call>{"name": .., "arguments": ..}</tool_call> <think></think>'


def ask(path: str, body: dict[str, Any], template: str = QWEN) -> tuple[int, dict[str, Any], list[Grammar | None]]:
    """Send a body; return status, answer, and the grammar of each request that came to the engine."""
    own = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "A"}, GENERATE: {"text": "A"}}[path]

    async def run(engine: FakeEngine) -> tuple[int, dict[str, Any], list[Grammar | None]]:
        response = await engine.post(path, own | body)
        return response.status_code, response.json(), [request.sampling.grammar for request in engine.requests]

    return with_engine(run, template=template)


def grammar(path: str, body: dict[str, Any]) -> Grammar | None:
    """Return the grammar of the one request that a body makes."""
    status, answer, grammars = ask(path, body)
    assert status == 200, answer
    (found,) = grammars
    return found


@pytest.mark.parametrize(
    ("path", "field", "begin", "end"),
    [
        (CHAT, "response_format", '{"type":"json_schema","json_schema":{"schema":', "}}"),
        (COMPLETIONS, "json_schema", "", ""),
        (GENERATE, "sampling_params.json_schema", '{"json_schema":', "}"),
        ("/api/chat", "format", "", ""),
        ("/completion", "json_schema", "", ""),
        ("/v1/messages", "output_config.format", '{"format":{"type":"json_schema","schema":', "}}"),
    ],
)
def test_a_schema_that_is_nested_too_deeply_is_refused_by_its_field(
    path: str, field: str, begin: str, end: str
) -> None:
    own = {"messages": [USER], "prompt": "A", "text": "A", "max_tokens": 1}
    schema = '{"not":' * 300 + "{}" + "}" * 300
    body = f'{json.dumps(own)[:-1]},"{field.partition(".")[0]}":{begin}{schema}{end}}}'

    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            response = await client.post(path, content=body)
        assert (response.status_code, engine.sent) == (400, [])
        assert f"{field}: is nested more than 254 levels deep" in response.text

    with_engine(run, template=QWEN, unknown_fields="ignore")


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            TEXT,
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "json_schema", "{}"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", TEXT),
        (
            {"response_format": {"type": "structural_tag", **TAGS}},
            "structural_tag",
            json.dumps(TAGS, separators=(",", ":")),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]'),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "ebnf", "root ::= x"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_json": TEXT}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": "root ::= x"}, "ebnf", "root ::= x"),
        ({"json_schema": TEXT}, "json_schema", TEXT),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": "root ::= x"}, "ebnf", "root ::= x"),
    ],
)
def test_fields_of_the_openai_bodies(body: dict[str, Any], kind: str, source: str) -> None:
    for path in (CHAT, COMPLETIONS):
        found = grammar(path, body)
        assert found is not None
        assert (found.kind, found.source) == (kind, source)


@pytest.mark.parametrize(
    ("params", "kind", "source"),
    [
        ({"json_schema": TEXT}, "json_schema", TEXT),
        ({"json_schema": SCHEMA}, "json_schema", TEXT),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": "root ::= x"}, "ebnf", "root ::= x"),
        ({"structural_tag": json.dumps(TAGS)}, "structural_tag", json.dumps(TAGS)),
    ],
)
def test_fields_of_sampling_params(params: dict[str, Any], kind: str, source: str) -> None:
    found = grammar(GENERATE, {"sampling_params": params})
    assert found == Grammar(kind, source, next(iter(params)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "regex": None},
        {"regex": "", "ebnf": "", "json_schema": "", "structural_tag": ""},
        {"guided_json": {}, "guided_regex": "", "guided_choice": [], "structured_outputs": {}},
    ],
)
def test_neutral_values_ask_for_nothing(body: dict[str, Any]) -> None:
    assert grammar(CHAT, body) is None


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"regex": "a", "ebnf": "b"}, "ebnf"),
        (CHAT, {"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"regex": "a", "ignore_eos": True}, "ignore_eos"),
        (CHAT, {"regex": "a", "tools": [TOOL]}, "regex"),
        (CHAT, {"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "regex"),
        (CHAT, {"guided_json": {"enum": ["a" * (MAX_GRAMMAR_CHARACTERS + 1)]}}, "guided_json"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": LONG_TOOLS, "tool_choice": "required"}, "tools"),
        (GENERATE, {"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(path: str, body: dict[str, Any], field: str) -> None:
    status, answer, grammars = ask(path, body)
    assert (status, answer["error"]["param"], grammars) == (400, field, [])


def test_a_grammar_goes_with_tools_that_may_not_be_called() -> None:
    found = grammar(CHAT, {"regex": "a", "tools": [TOOL], "tool_choice": "none"})
    assert found is not None
    assert found.kind == "regex"


def test_a_forced_call_is_a_grammar_of_the_models_format() -> None:
    found = grammar(CHAT, {"tools": [TOOL], "tool_choice": "required"})
    assert found is not None
    source = json.loads(found.source)
    assert (found.kind, found.field, source["many"], source["separator"]) == ("tool_calls", "tool_choice", True, "\n")
    (call,) = source["calls"]
    assert call == {
        "before": '<tool_call>\n{"name": "weather", "arguments": ',
        "schema": SCHEMA,
        "after": "}\n</tool_call>",
    }


def test_a_named_tool_is_forced_alone_and_once() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    choice = {"type": "function", "function": {"name": "other"}}
    found = grammar(CHAT, {"tools": [TOOL, other], "tool_choice": choice})
    assert found is not None
    source = json.loads(found.source)
    assert not source["many"]
    assert [call["schema"] for call in source["calls"]] == [{"type": "object"}]


def test_a_format_that_cannot_be_forced_is_refused() -> None:
    glm = "tools <tool_call><arg_key></arg_key><arg_value>"
    status, answer, _ = ask(CHAT, {"tools": [TOOL], "tool_choice": "required"}, template=glm)
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
    assert "can't be forced" in answer["error"]["message"]
