"""Arguments of tool calls that are told while the model writes them: the same for every way to cut the text."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answer_parts import Parts, parts_of, random_pieces, read, read_every_way
from support.tool_texts import ARGUMENTS, CALL, REQUEST, TWO_CALLS, as_values, two_calls

from pdserve.server.output_parsers import base
from pdserve.server.output_parsers.base import OutputParser, ParseRequest
from pdserve.server.output_parsers.choice import BY_NAME
from pdserve.server.output_parsers.events import ToolArgumentsDelta, ToolCall, ToolCallEnded, ToolCallStarted
from pdserve.server.output_parsers.json_scan import MAX_LEVELS, JsonScan
from pdserve.server.output_parsers.reader import Malformed, Reader, make_call

STREAMED = replace(REQUEST, streams_arguments=True)
IN_JSON = [name for name, text in TWO_CALLS.items() if "§" in text]
"""Formats with arguments in JSON."""
BROKEN = {
    "an unquoted value": '{"word": sea}',
    "a bare value": '{"word": "sea", lion}',
    "a missing brace": '{"word": "sea"',
    "a wrong bracket": '{"word": ["sea"}',
    "a wrong escape": '{"word": "sea \\q"}',
    "half of a pair": '{"word": "sea \\ud83d"}',
    "an infinite number": '{"word": "sea", "most": 1e999}',
    "a comma at the end": '{"word": "sea",}',
    "too many levels": '{"word": ' + "[" * 250 + "]" * 250 + "}",
}


def told_after(name: str, text: str, seed: int, most: int) -> list[Parts]:
    """Return what has been told after each character of ``text``, which comes in pieces; only at their ends."""
    parser, events, told = OutputParser(BY_NAME[name], STREAMED), [], [parts_of([])] * (len(text) + 1)
    at = 0
    for piece in random_pieces(text, seed, most):
        events += parser.feed(piece)
        at += len(piece)
        told[at] = parts_of(events)
    return told


@pytest.mark.parametrize("name", IN_JSON)
def test_arguments_come_as_they_are_written(name: str) -> None:
    parser, text = OutputParser(BY_NAME[name], STREAMED), two_calls(name)
    events = [event for character in text for event in parser.feed(character)] + parser.end()
    of_first = [event for event in events if not isinstance(event, ToolCall) and getattr(event, "number", 1) == 0]
    start, *deltas, end = of_first
    assert start == ToolCallStarted("find", 0)
    assert end == ToolCallEnded(0, True)
    assert len(deltas) > len(ARGUMENTS) / 2
    assert "".join(event.text for event in deltas if isinstance(event, ToolArgumentsDelta)) == ARGUMENTS
    assert parser.calls == 2


@pytest.mark.parametrize("name", TWO_CALLS)
def test_calls_add_up_to_those_of_a_whole_answer(name: str) -> None:
    text = two_calls(name) + "  \n\n "
    assert read_every_way(BY_NAME[name], STREAMED, text) == read(BY_NAME[name], REQUEST, [text])


@pytest.mark.parametrize("name", TWO_CALLS)
@pytest.mark.parametrize("streams", [False, True])
def test_calls_beyond_the_maximum_are_left_out(name: str, streams: bool) -> None:
    text, one = two_calls(name), replace(REQUEST, most_calls=1, streams_arguments=streams)
    both = read(BY_NAME[name], REQUEST, [text])
    assert read_every_way(BY_NAME[name], one, text) == both._replace(calls=both.calls[:1])


@pytest.mark.parametrize("name", TWO_CALLS)
@pytest.mark.parametrize("line_break", ["\n", "\t\x01"])
def test_control_characters_in_strings_become_escapes(name: str, line_break: str) -> None:
    text = TWO_CALLS[name].replace("§", f'{{"word": "sea{line_break}lion"}}')
    parts = read_every_way(BY_NAME[name], STREAMED, text)
    assert parts == read(BY_NAME[name], REQUEST, [text])
    if name in IN_JSON:
        assert parts.calls[0].arguments == json.dumps({"word": f"sea{line_break}lion"})


@pytest.mark.parametrize("name", TWO_CALLS)
def test_what_is_told_depends_on_the_text_so_far_alone(name: str) -> None:
    """So an answer goes on at another instance with the next character."""
    text = f"Look: {two_calls(name)}" if name not in ("llama3_json", "pythonic", "gpt_oss") else two_calls(name)
    by_character = told_after(name, text, 0, 1)
    for seed, most in ((1, 3), (2, 11), (3, 60)):
        told = told_after(name, text, seed, most)
        ends = set(itertools.accumulate(map(len, random_pieces(text, seed, most))))
        assert all(told[at] == by_character[at] for at in ends)


@pytest.mark.parametrize("name", IN_JSON)
@pytest.mark.parametrize("why", BROKEN)
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_turns_out_to_be_no_call_is_told_once(name: str, why: str, is_cut: bool) -> None:
    written = BROKEN[why]
    text = TWO_CALLS[name].replace("§", written)
    parts = read_every_way(BY_NAME[name], STREAMED, text, is_cut=is_cut)
    whole = read(BY_NAME[name], REQUEST, [text], is_cut=is_cut)
    assert as_values(parts.calls) == as_values(whole.calls)
    [broken] = parts.broken
    assert broken.name == "find"
    with pytest.raises(ValueError, match=r"."):
        json.loads(broken.arguments)
    assert text.count(broken.arguments) == 1
    if not is_cut:
        rest = "".join(text[text.index(broken.arguments) + len(broken.arguments) :].split())
        told = "".join(parts.text.split())
        assert rest.startswith(told)
        assert told in "".join(whole.text.split())


@pytest.mark.parametrize("name", TWO_CALLS)
def test_a_call_that_a_limit_cuts_is_told_in_part(name: str) -> None:
    text = two_calls(name)
    for end in range(len(text)):
        parts = read(BY_NAME[name], STREAMED, [text[:end]], is_cut=True)
        whole = read(BY_NAME[name], REQUEST, [text[:end]], is_cut=True)
        assert as_values(parts.calls) == as_values(whole.calls)
        assert "sea" not in parts.text or name == "pythonic"
        for broken in parts.broken:
            assert name in IN_JSON
            assert (ARGUMENTS if broken.name == "find" else "{}").startswith(broken.arguments)
            assert broken.arguments not in (ARGUMENTS, "{}")


@pytest.mark.parametrize("name", IN_JSON)
def test_arguments_without_their_end_are_not_closed(name: str) -> None:
    """The brace that ends them is held back until the call has its end."""
    text = two_calls(name)
    at = text.index(ARGUMENTS) + len(ARGUMENTS)
    parser = OutputParser(BY_NAME[name], STREAMED)
    told = parts_of(parser.feed(text[:at]))
    if name == "mistral":
        assert told.calls == [CALL]
    else:
        assert told.broken == (CALL._replace(arguments=ARGUMENTS[:-1]),)


HERMES_TEXTS = {
    "arguments before the name": ('{"arguments": {"word": "a"}, "name": "find"}', '{"word": "a"}'),
    "arguments as a string": ('{"name": "find", "arguments": "{\\"word\\": \\"a\\"}"}', '{"word": "a"}'),
    "no arguments": ('{"name": "find"}', "{}"),
    "null": ('{"name": "find", "arguments": null}', "{}"),
    "fields after them": ('{"name": "find", "arguments": {"word": "a"}, "id": [1, {"b": "}"}]}', '{"word": "a"}'),
    "white space": ('{ "name" : "find" , "arguments" : { "word" : "a" } }', '{ "word" : "a" }'),
}


@pytest.mark.parametrize("why", HERMES_TEXTS)
def test_calls_in_unusual_order_are_read(why: str) -> None:
    written, arguments = HERMES_TEXTS[why]
    text = f"Hm. <tool_call>\n{written}\n</tool_call> So."
    parts = read_every_way(BY_NAME["hermes"], STREAMED, text)
    assert parts == read(BY_NAME["hermes"], REQUEST, [text]) == Parts("Hm.  So.", "", [ToolCall("find", arguments)])


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "find", "arguments": {"word": "a"}, "parameters": {}}',
        '{"name": "find", "arguments": {"word": "a"}, "name": "now"}',
        '{"name": "find", "arguments": {"word": "a"}} and more',
        '{"name": "find", "arguments": {"word": "a"}',
    ],
)
def test_a_call_that_breaks_after_its_arguments(written: str) -> None:
    text = f"<tool_call>{written}</tool_call>"
    parts = read_every_way(BY_NAME["hermes"], STREAMED, text)
    assert parts.broken == (ToolCall("find", '{"word": "a"'),)
    assert parts.text == text[text.index("}") :]
    assert read(BY_NAME["hermes"], REQUEST, [text]) == Parts(text, "", [])


def test_the_second_call_of_a_list_breaks() -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "find", "arguments": {"word": x}}] end'
    now = ToolCall("now", "{}")
    parts = read_every_way(BY_NAME["mistral"], STREAMED, text)
    assert parts == Parts("x}}] end", "", [now], (ToolCall("find", '{"word": ', 1),))
    assert read_every_way(BY_NAME["mistral"], REQUEST, text) == Parts(
        '{"name": "find", "arguments": {"word": x}}] end', "", [now]
    )


def test_an_answer_that_is_json_of_another_kind_is_text() -> None:
    for text in ('{"name": "Ana", "parameters": {"a": 1}}', '{"name": "find", "size": 3, "parameters": [1]}'):
        assert read_every_way(BY_NAME["llama3_json"], STREAMED, text) == Parts(text, "", [])


def test_a_call_that_is_not_offered_is_text_in_harmony() -> None:
    text = "<|channel|>commentary to=functions.find<|message|>" + ARGUMENTS
    assert read_every_way(BY_NAME["gpt_oss"], ParseRequest(streams_arguments=True), text) == Parts(ARGUMENTS, "", [])


@pytest.mark.parametrize("name", TWO_CALLS)
@given(data=st.data())
def test_damaged_texts_are_read_alike_however_they_are_cut(name: str, data: st.DataObject) -> None:
    text = two_calls(name)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.text(st.sampled_from('x"{}[]<>|,:\\u1'), max_size=2)) + text[at + 1 :]
    is_cut = data.draw(st.booleans())
    parts = read_every_way(BY_NAME[name], STREAMED, text, is_cut=is_cut)
    for call in parts.calls:
        assert isinstance(json.loads(call.arguments), dict)
    for broken in parts.broken:
        with pytest.raises(ValueError, match=r"."):
            json.loads(broken.arguments)
    whole = read(BY_NAME[name], REQUEST, [text], is_cut=is_cut)
    if not parts.broken:
        assert parts == whole


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.text(st.sampled_from('\n\\"a\U0001f600')),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)

ESCAPED_BREAK = re.compile(r"(?<!\\)((?:\\\\)*)\\n")


@given(
    value=st.dictionaries(st.text(max_size=5), JSON, max_size=5),
    is_ascii=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    has_raw_breaks=st.booleans(),
    name=st.sampled_from(IN_JSON),
)
def test_any_object_is_told_as_it_is_written(
    value: object, is_ascii: bool, indent: int | None, has_raw_breaks: bool, name: str
) -> None:
    written = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    text = TWO_CALLS[name].replace("§", ESCAPED_BREAK.sub(r"\1\n", written) if has_raw_breaks else written)
    parts = read_every_way(BY_NAME[name], STREAMED, text)
    assert parts.calls[0] == ToolCall("find", written)
    assert len(parts.calls) == 2
    assert parts == read(BY_NAME[name], REQUEST, [text])


@given(text=st.text(st.sampled_from('{}[]":,\\u0dD8x1eE+-. truefalsn\n'), max_size=30))
def test_the_same_arguments_are_refused_as_in_whole_answers(text: str) -> None:
    """The scan accepts what Python's decoder and orjson accept, and nothing else."""
    text = f'{{"a": {text}}}'
    found = read(BY_NAME["mistral"], STREAMED, [f"[TOOL_CALLS]now[ARGS]{text}"])
    try:
        json.loads(text, strict=False, parse_constant=partial(make_call, "now"))
        is_object = True
    except (ValueError, Malformed, TypeError):
        is_object = False
    if found.calls and not found.text:
        assert is_object
        make_call("now", found.calls[0].arguments)
    elif is_object:
        with pytest.raises(Malformed):
            make_call("now", json.dumps(json.loads(text, strict=False)))


def test_calls_have_as_many_levels_as_whole_ones() -> None:
    for levels in (MAX_LEVELS, MAX_LEVELS + 1):
        written = '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
        text = f"[TOOL_CALLS]now[ARGS]{written}"
        streamed, whole = (read(BY_NAME["mistral"], request, [text]) for request in (STREAMED, REQUEST))
        assert streamed.calls == whole.calls == [ToolCall("now", written)][: levels <= MAX_LEVELS]
    with pytest.raises(Malformed):
        make_call("now", written)


def test_each_token_of_a_long_argument_is_told_at_once() -> None:
    parser = OutputParser(BY_NAME["hermes"], STREAMED)
    parser.feed('<tool_call>{"name": "find", "arguments": {"word": "')
    for _ in range(2_000):
        [event] = parser.feed("word ")
        assert event == ToolArgumentsDelta("word ", 0)
    assert parser.feed('"}}</tool_call>') == [ToolArgumentsDelta('"}', 0), ToolCallEnded(0, True)]


class CountingReader(Reader):
    """A reader that counts the characters that it is given."""

    given, _text = 0, ""

    @property
    def text(self) -> str:
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        self._text, self.given = text, self.given + len(text)


def test_line_breaks_in_arguments_are_escaped_without_a_copy_for_each() -> None:
    """An answer that has moved here comes in one piece, however long it is."""
    reader, added = CountingReader(), list[str]()
    written = '{"code": ["' + "a\n" * 5_000 + '", ' + '"b\n", ' * 1_000 + '"c"]}'
    reader.text = written
    for _ in JsonScan(reader, added.append, drops_read=True).value():
        pytest.fail("all of the text is there")
    assert "".join(added) == written.replace("\n", "\\n")
    assert len(added) == 1
    assert reader.given < 2 * len(written)


def test_twice_as_many_calls_in_one_piece_are_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(calls: int) -> int:
        call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        parser = OutputParser(BY_NAME["kimi_k2"], STREAMED)
        parser.feed("<|tool_calls_section_begin|>" + call * calls)
        assert parser.calls == calls
        return readers.pop().given

    readers: list[CountingReader] = []

    def make_reader(**how: Any) -> Reader:
        readers.append(CountingReader(**how))
        return readers[-1]

    monkeypatch.setattr(base, "Reader", make_reader)
    assert given(2_000) < 2.5 * given(1_000)


@pytest.mark.parametrize("streams", [False, True])
def test_a_token_of_a_call_does_not_copy_the_text_before(streams: bool) -> None:
    size = 8 << 20
    tracemalloc.start()
    try:
        parser = OutputParser(BY_NAME["hermes"], replace(REQUEST, streams_arguments=streams))
        parser.feed('<tool_call>{"name": "find", "arguments": {"word": "' + "w" * size)
        parser.feed("w")
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        parser.feed("w")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < size / 2
