"""Parsers of tool calls and reasoning: our own texts of every format, and properties of all of them."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answer_parts import Parts, read, read_every_way
from support.tool_texts import CALL, NOW, REQUEST, TOOLS, TWO_CALLS, as_values, two_calls

from pdserve.server.output_parsers.base import OutputFormat, OutputParser, ParseRequest
from pdserve.server.output_parsers.choice import BY_NAME, OutputFormats, choose_formats
from pdserve.server.output_parsers.events import ToolCall
from pdserve.server.output_parsers.registry import FORMATS

NAMES = [one.name for one in FORMATS]


def test_every_format_with_calls_has_an_example() -> None:
    assert set(TWO_CALLS) == set(NAMES) - {"think"}


@pytest.mark.parametrize("name", TWO_CALLS)
def test_two_calls(name: str) -> None:
    parts = read_every_way(BY_NAME[name], REQUEST, two_calls(name) + "  \n\n ")
    assert (parts.text, parts.reasoning) == ("", "")
    assert as_values(parts.calls) == as_values([CALL, NOW])


@pytest.mark.parametrize("name", TWO_CALLS)
def test_a_call_that_a_limit_cuts_is_none(name: str) -> None:
    text = two_calls(name)
    for end in range(len(text)):
        parts = read(BY_NAME[name], REQUEST, [text[:end]], is_cut=True)
        assert as_values(parts.calls) in ([], as_values([CALL]), as_values([CALL, NOW]))
        assert "sea" not in parts.text or name in ("llama3_json", "pythonic")


@pytest.mark.parametrize("name", [name for name in TWO_CALLS if name != "gpt_oss"])
def test_without_tools_calls_are_text(name: str) -> None:
    text = two_calls(name)
    assert read_every_way(BY_NAME[name], ParseRequest(), text) == Parts(text, "", [])


@pytest.mark.parametrize("name", [name for name in TWO_CALLS if name not in ("gpt_oss", "deepseek_v32")])
@pytest.mark.parametrize("broken", ["<tool_call>no json</tool_call>!", '{"name": 3}', "[TOOL_CALLS]?{", "[1]", "f(x)"])
def test_what_is_no_call_is_not_lost(name: str, broken: str) -> None:
    parts = read_every_way(BY_NAME[name], REQUEST, f"a {broken} b")
    assert parts == Parts(f"a {broken} b", "", [])


def nested(levels: int) -> str:
    return '{"word": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize("name", [name for name, text in TWO_CALLS.items() if "§" in text])
@pytest.mark.parametrize(
    "arguments",
    [*('{"word": 1e999}', '{"word": "\\ud800"}', '{"word": "\n\\ud800"}'), *map(nested, (260, 900, 960))],
    ids=["infinite", "surrogate", "line break and surrogate", "260", "900", "960"],
)
def test_a_call_that_no_answer_can_contain_is_text(name: str, arguments: str) -> None:
    text = TWO_CALLS[name].replace("§", arguments)
    whole = read(BY_NAME[name], REQUEST, [text])
    assert read(BY_NAME[name], REQUEST, [text[: len(text) // 2], text[len(text) // 2 :]]) == whole
    assert arguments in whole.text
    assert as_values(whole.calls) in ([], as_values([NOW]))


@pytest.mark.parametrize("name", ["wea\\ud83d", "\\udc00"])
def test_a_name_with_half_a_surrogate_pair_is_text(name: str) -> None:
    text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    assert read_every_way(BY_NAME["hermes"], REQUEST, text) == Parts(text, "", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>call:find{most:NaN}<tool_call|>"),
        ("gemma4", "<|tool_call>call:find{most:[1,-1e999]}<tool_call|>"),
        ("gemma4", '<|tool_call>call:find{word:"\\ud800"}<tool_call|>'),
        ("gemma4", f"<|tool_call>call:find{{word:{'[' * 3000}"),
        ("gemma4", f"<|tool_call>call:find{{word:{'{a:' * 3000}"),
        ("gemma4", f"<|tool_call>call:find{{word:{'[' * 200}1{']' * 200}}}<tool_call|>"),
        ("pythonic", r"[find(word='\ud800')]"),
        ("glm", "<tool_call>find<arg_key>most</arg_key><arg_value>1e999</arg_value></tool_call>"),
    ],
)
def test_values_that_no_answer_can_contain_are_text(name: str, text: str) -> None:
    assert read(BY_NAME[name], ParseRequest({"find": {}}), [text]) == Parts(text, "", [])


@pytest.mark.parametrize("levels", [2, 100])
def test_calls_of_some_levels_fit_into_answers(levels: int) -> None:
    arguments = nested(levels)
    found = read(BY_NAME["hermes"], REQUEST, [f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'])
    assert orjson.dumps({"a": [orjson.loads(call.arguments) for call in found.calls]})
    assert [call.arguments for call in found.calls] == [arguments]
    deep = f"{'[' * (levels - 1)}1{']' * (levels - 1)}"
    gemma = read(BY_NAME["gemma4"], REQUEST, [f"<|tool_call>call:now{{a:{deep}}}<tool_call|>"])
    assert as_values(gemma.calls) == [("now", {"a": json.loads(deep)})]


@pytest.mark.parametrize("name", [one.name for one in FORMATS if one.reasoning[0].startswith(("<think", "[THINK"))])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_before_text(name: str, is_open: bool) -> None:
    begin, end = BY_NAME[name].reasoning
    request = ParseRequest(begins_in_reasoning=is_open)
    text = f"{'' if is_open else begin}\n first\n\nthen \n{end}\n\nThe answer.\n"
    assert read_every_way(BY_NAME[name], request, text) == Parts("The answer.\n", "first\n\nthen", [])


@pytest.mark.parametrize("tool", ["on", "function", "f"])
def test_a_tool_with_a_name_that_is_a_part_of_the_marks(tool: str) -> None:
    call = f"function<｜tool▁sep｜>{tool}\n```json\n{{}}\n```"
    text = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
    assert read_every_way(BY_NAME["deepseek_v3"], ParseRequest({tool: {}}), text).calls == [ToolCall(tool, "{}")]


@pytest.mark.parametrize("called", ["functions.now:0", "functions.now", "now:12", " now "])
def test_names_of_kimi_calls_with_and_without_their_ornaments(called: str) -> None:
    text = f"<|tool_calls_section_begin|><|tool_call_begin|>{called}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert read_every_way(BY_NAME["kimi_k2"], REQUEST, f"{text}<|tool_calls_section_end|>").calls == [NOW]


def test_reasoning_that_has_no_end() -> None:
    request = ParseRequest(TOOLS, begins_in_reasoning=True)
    assert read_every_way(BY_NAME["hermes"], request, "on and on ") == Parts("", "on and on", [])
    called = 'hm\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read_every_way(BY_NAME["hermes"], request, called) == Parts("", "hm", [NOW])
    thought = 'hm <tool_call>{"name": "now"}</tool_call> or not</think>no'
    assert read_every_way(BY_NAME["hermes"], request, thought) == Parts("no", thought[:-10], [])


def test_reasoning_that_stays_in_the_text() -> None:
    text = "<think>a</think>b"
    assert read_every_way(BY_NAME["hermes"], ParseRequest(separates_reasoning=False), text) == Parts(text, "", [])


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(st.sampled_from("ab <>{}[]()|=\"'\\\n:,/"), max_size=60))
def test_any_text_is_read_to_its_end(name: str, text: str) -> None:
    whole = read_every_way(BY_NAME[name], REQUEST, text)
    assert not whole.calls or name in ("llama3_json", "pythonic")
    if name not in ("gpt_oss", "kimi_k2"):
        assert whole.text.rstrip() == text.rstrip()


@pytest.mark.parametrize("name", TWO_CALLS)
@given(data=st.data())
def test_damaged_calls_end_somewhere(name: str, data: st.DataObject) -> None:
    text = two_calls(name)
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.text(st.sampled_from('x"{}<>|'), max_size=2)) + text[at + 1 :]
    for call in read_every_way(BY_NAME[name], REQUEST, text).calls:
        assert isinstance(json.loads(call.arguments), dict)


ODD_SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just({"$ref": "#/$defs/a"}),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "enum", "anyOf", "allOf", "$ref", "const", "properties"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", TWO_CALLS)
@given(odd=ODD_SCHEMAS)
def test_odd_schemas_of_tools_lose_no_call(name: str, odd: object) -> None:
    schemas = [odd, {"properties": odd}, {"properties": {"word": odd, "most": odd}, "$defs": {"a": odd}}]
    for schema in schemas:
        parts = read(BY_NAME[name], ParseRequest({"find": schema, "now": odd}), [two_calls(name)])
        assert [call.name for call in parts.calls] == ["find", "now"]


def test_references_that_multiply_are_read_in_bounded_time() -> None:
    again = [{"$ref": "#/$defs/a"}] * 1000
    schema = {"properties": {"word": {"anyOf": again}}, "$defs": {"a": {"anyOf": again}}}
    [call, _] = read(BY_NAME["glm"], ParseRequest({"find": schema, "now": {}}), [two_calls("glm")]).calls
    assert json.loads(call.arguments)["word"] == 'sea "lion"'


def test_a_call_by_a_very_long_chain_of_names_is_read() -> None:
    name = ".".join(["a"] * 1500)
    parts = read(BY_NAME["pythonic"], ParseRequest({name: {}}), [f"[{name}()]"])
    assert parts.calls == [ToolCall(name, "{}")] or parts.text == f"[{name}()]"


def test_a_long_argument_costs_linear_time() -> None:
    parser, steps = OutputParser(BY_NAME["hermes"], REQUEST), 0
    parser.feed('<tool_call>{"name": "find", "arguments": {"word": "')
    for _ in range(20_000):
        steps += len(parser.feed("word "))
    calls = [*parser.feed('"}}</tool_call>'), *parser.end()]
    assert steps == 0
    assert calls == [ToolCall("find", json.dumps({"word": "word " * 20_000}))]


TEMPLATES = {
    # Within a string of the template, quotes are escaped.
    "hermes": '{{ "tools <tool_call>{\\"name\\": <n>, \\"arguments\\": <args>}</tool_call> <think></think>" }}',
    "qwen3_coder": "tools <tool_call>\\n<function=example><parameter=x></parameter></function> </think>",
    "glm": "tools <arg_key>{{ k }}</arg_key><arg_value> <think></think>",
    "mistral": "[AVAILABLE_TOOLS]{{ tools }} [TOOL_CALLS]",
    "llama3_json": '<|start_header_id|> tools {"name": n, \\"parameters\\": p}',
    "deepseek_v3": "tools <｜tool▁calls▁begin｜><｜tool▁sep｜> </think>",
    "gpt_oss": "tools <|channel|>analysis<|message|> <|end|>",
    "granite": "tools <|start_of_role|>",
    "phi4": "{{ tools }} write functools[{name, arguments}]",
    "pythonic": "<|header_start|> {{ tools }} write [func(a=1)]",
}
OTHER_TEMPLATES = [
    ("hermes", """{{ tools }}{{- "as in <tool_call>\n" }}\n{{- '{"name": n, "arguments": a}' }}{{ "</tool_call>" }}"""),
    ("hermes", """{{ tools | tojson ~ "<tool_call>" ~ '{"name": n, "arguments": a}' ~ "</tool_call>" }}"""),
    ("hermes", '<|start_of_role|>{{ tools }} write <tool_call>\\n{\\"name\\": n, \\"arguments\\": a}</tool_call>'),
    ("hermes", "{{ tools }} write\n<tool_call>\n{'arguments': <a>, 'name': <n>}\n</tool_call>"),
    ("llama3_json", '<|header_start|> {{ tools }} write {"name": n, "parameters": p}'),
    ("pythonic", "<|start_header_id|> {{ tools }} parameters [func_name1(a=1), func_name2(b=2)]"),
    ("pythonic", "<start_of_turn> {{ tools }} write [func_name1(a=1)]"),
    ("phi4", "<|tool|>{{ tools }}<|/tool|>"),
    # Not known: calls of one kind within the marks of another.
    (None, '{{ tools }} list in <tool_call></tool_call> as follows: <tool_calls>[{"arguments": a}]</tool_calls>'),
    (None, "{{ tools }} <seed:tool_call>\n<function=f><parameter=p></parameter></function></seed:tool_call>"),
    (None, "<|start_header_id|> {{ tools }} <function=NAME>parameters</function>"),
    (None, '<|start_header_id|> {{ tools }} [{"name": n, "arguments": a}] if no parameters lack'),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_says_what_format_it_is(name: str) -> None:
    found = choose_formats("auto", "auto", TEMPLATES[name])
    assert (found.calls, found.renders_tools) == (BY_NAME[name], True)
    without = ("mistral", "llama3_json", "granite", "phi4", "pythonic")
    assert found.reasoning is (None if name in without else BY_NAME[name])


@pytest.mark.parametrize(("name", "template"), OTHER_TEMPLATES)
def test_templates_that_differ_from_the_usual_of_their_kind(name: str | None, template: str) -> None:
    assert choose_formats("auto", "auto", template).calls is BY_NAME.get(name or "")


def test_options_come_before_the_template() -> None:
    assert choose_formats("none", "none", TEMPLATES["hermes"]) == OutputFormats(None, None, True)
    assert choose_formats("mistral", "think", None) == OutputFormats(BY_NAME["mistral"], BY_NAME["think"], False)
    assert choose_formats("auto", "auto", "{{ messages }} <think> </think>").reasoning is BY_NAME["think"]
    assert choose_formats("auto", "auto", None) == OutputFormats()


def test_calls_of_one_format_behind_reasoning_of_another() -> None:
    chosen = choose_formats("llama3_json", "think", None).for_request(has_tools=True, separates_reasoning=True)
    assert isinstance(chosen, OutputFormat)
    text = '<think>which?</think>{"name": "now", "parameters": {}}'
    assert read_every_way(chosen, REQUEST, text) == Parts("", "which?", [NOW])
