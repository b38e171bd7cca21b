"""Anthropic's bodies: the conversation, the tools and the sampling that become of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.messages.conversation import ChatMessage, ChatToolCall, Conversation
from pdserve.messages.packed_text import LONG_CHARACTERS, PackedText
from pdserve.server.http.anthropic.blocks import BlockBody
from pdserve.server.http.anthropic.conversation import read_answerable, read_conversation, tool_use_of
from pdserve.server.http.anthropic.schemas import CountTokensBody, MessagesBody
from pdserve.server.http.bodies.field_names import FieldNames
from pdserve.server.http.bodies.message_fields import MAX_MESSAGES, MAX_PARTS
from pdserve.server.http.bodies.tool_fields import MAX_TOOL_CALLS, MAX_TOOLS
from pdserve.server.http.errors import ApiError
from pdserve.server.http.generation.tool_use import ToolUse
from pdserve.server.http.parsing import validate

USER = {"role": "user", "content": "Weather in Rome?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Weather now.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "20 degrees"}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def parsed(body: dict[str, Any], *, unknown: Any = "refuse") -> MessagesBody:
    whole = {"max_tokens": 9, "messages": [USER], **body}
    FieldNames(unknown).check(MessagesBody, whole)
    return validate(MessagesBody, whole)


def read(*turns: dict[str, Any], **fields: Any) -> Conversation:
    return read_conversation(parsed({"messages": [*turns], **fields}))


def refusal(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(body)
    assert caught.value.status == 400
    return caught.value


def test_a_text_and_a_block_of_it_are_the_same() -> None:
    assert read(USER) == read({"role": "user", "content": [text("Weather in Rome?", cache_control={"type": "x"})]})
    assert read(USER) == Conversation([ChatMessage("user", "Weather in Rome?")])


def test_the_system_prompt_is_the_first_turn_without_what_is_meant_for_servers() -> None:
    blocks = [text("x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"), text("Be brief."), text("Use tools.")]
    assert read(USER, system="Be brief.").messages[0] == ChatMessage("system", "Be brief.")
    assert read(USER, system=blocks[:2]).messages[0] == ChatMessage("system", "Be brief.")
    assert read(USER, system=blocks).messages[0] == ChatMessage("system", ["Be brief.", "Use tools."])
    assert read(USER, system=blocks[:1]) == read(USER, system=[]) == read(USER)


def test_a_system_prompt_loses_no_more_than_the_line_for_servers() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1;"
    for joined in (f"{line}\n\nBe brief.\nUse tools.", f"{line}\r\n\r\nBe brief.\nUse tools."):
        for system in (joined, [text(joined)]):
            assert read(USER, system=system).messages[0] == ChatMessage("system", "Be brief.\nUse tools.")
    assert read(USER, system=line) == read(USER, system=f"{line}\n\n") == read(USER)
    quoted = f"Be brief.\n{line}"
    assert read(USER, system=quoted).messages[0] == ChatMessage("system", quoted)


class Counted:
    """A property that counts how often it is asked for."""

    def __init__(self, original: property) -> None:
        self.times = 0
        self._original = original

    def __get__(self, block: Any, _: Any = None) -> Any:
        self.times += 1
        return self._original.__get__(block)


def test_a_long_conversation_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Counted(BlockBody.__dict__["tool_changes"])
    monkeypatch.setattr(BlockBody, "tool_changes", changes)
    turns, blocks = 50, [text("a")] * 2

    def asked(content: Any, **fields: Any) -> int:
        changes.times = 0
        body = parsed({"messages": [{"role": "user", "content": content}] * turns, **fields})
        checked = changes.times
        read_answerable(body)
        tool_use_of(body)
        assert changes.times == checked, "a large body is checked beside the event loop, so that is when"
        return changes.times

    assert asked(blocks, tools=[TOOL], tool_choice={"type": "any"}) == turns * len(blocks)
    assert asked(blocks, tools=[TOOL]) == turns * len(blocks)
    assert asked(blocks) == 0, "there are no tools to change"
    assert asked("a", tools=[TOOL]) == 0, "a text changes no tools"


def test_a_text_becomes_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(BlockBody, "model_construct", lambda **fields: made.append(fields))
    body = parsed({"messages": [USER, {"role": "assistant", "content": "It is"}], "tools": [TOOL]})
    chat = read_conversation(body)
    assert [turn.content for turn in chat.messages] == [USER["content"], "It is"]
    assert body.characters > len("It is")
    assert not made


def test_calls_and_results_become_turns_of_their_own() -> None:
    said = {"role": "assistant", "content": [text("Let me look."), CALL, {**CALL, "id": "toolu_2"}]}
    parts = [text("20"), text("degrees")]
    other = {"type": "tool_result", "tool_use_id": "toolu_2", "content": parts}
    chat = read(USER, said, {"role": "user", "content": [RESULT, other, text("And now?")]})
    assert chat.messages[1:] == [
        ChatMessage(
            "assistant",
            "Let me look.",
            tool_calls=[ChatToolCall(f"toolu_{i}", "weather", {"city": "Rome"}) for i in (1, 2)],
        ),
        ChatMessage("tool", "20 degrees", tool_call_id="toolu_1"),
        ChatMessage("tool", ["20", "degrees"], tool_call_id="toolu_2"),
        ChatMessage("user", "And now?"),
    ]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": [text("no"), text("city")], "is_error": True}, ["Error: no", "city"]),
        ({"content": "20", "is_error": False}, "20"),
        ({"content": []}, ""),
        ({"is_error": True}, "Error: "),
        ({}, ""),
    ],
)
def test_a_result_says_that_its_tool_failed(result: dict[str, Any], content: Any) -> None:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", **result}
    chat = read(USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [block]})
    assert chat.messages[1] == ChatMessage(
        "assistant", None, tool_calls=[ChatToolCall("toolu_1", "weather", {"city": "Rome"})]
    )
    assert chat.messages[2] == ChatMessage("tool", content, tool_call_id="toolu_1")


def test_thinking_goes_to_the_template_apart() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Rome, so a call.", "signature": "0a"},
        {"type": "redacted_thinking", "data": "0b"},
        {"type": "thinking", "thinking": "", "signature": "0c"},
        text("Let me look."),
        {**CALL, "caller": {"type": "direct"}},
    ]
    turn = read(USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [RESULT]}).messages[1]
    assert (turn.reasoning_content, turn.content, len(turn.tool_calls)) == ("Rome, so a call.", "Let me look.", 1)
    alone = read(USER, {"role": "assistant", "content": blocks[1:2]}, USER).messages[1]
    assert alone == ChatMessage("assistant", "")


def test_turns_of_one_role_become_one() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    first = {"role": "assistant", "content": [thought, text("a")]}
    second = {"role": "assistant", "content": [thought, text("b"), CALL]}
    chat = read(USER, USER, first, second, {"role": "user", "content": [RESULT, text("x"), text("y")]}, USER)
    assert [(turn.role, turn.content) for turn in chat.messages] == [
        ("user", ["Weather in Rome?"] * 2),
        ("assistant", ["a", "b"]),
        ("tool", "20 degrees"),
        ("user", ["x", "y", "Weather in Rome?"]),
    ]
    assert chat.messages[1].reasoning_content == "Hm.\nHm."


def test_instructions_within_a_conversation_are_reminders_in_the_users_turn() -> None:
    block = {"type": "mid_conv_system", "content": [text("Now in French.")]}
    answer, told = {"role": "assistant", "content": "Hi."}, {"role": "system", "content": "Now in French."}
    inside = read(USER, answer, {"role": "user", "content": [block, text("And?")]}, system="Be brief.")
    between = read(USER, answer, told, {"role": "user", "content": "And?"})
    assert inside.messages[1:] == between.messages
    reminder = "<system-reminder>\nNow in French.\n</system-reminder>"
    assert between.messages[2:] == [ChatMessage("user", [reminder, "And?"])]
    after = read(USER, told)
    assert after.messages == [ChatMessage("user", ["Weather in Rome?", reminder])]
    assert after.add_generation_prompt
    first = read(told, USER, system="Be brief.")
    assert first.messages[0] == ChatMessage("system", ["Be brief.", "Now in French."])


def test_an_answer_goes_on_with_the_assistants_last_turn() -> None:
    chat = read(USER, {"role": "assistant", "content": "It is"})
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    chat = read(USER)
    assert (chat.add_generation_prompt, chat.continue_final_message) == (True, False)
    counted = validate(CountTokensBody, {"messages": [USER, {"role": "assistant", "content": [CALL]}]})
    chat = read_conversation(counted)
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, False)


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "assistant", "content": [text("Hm."), CALL]}],
        [{"role": "assistant", "content": [CALL]}, {"role": "assistant", "content": "ok"}],
        [
            {"role": "assistant", "content": [CALL]},
            {"role": "system", "content": []},
            {"role": "assistant", "content": "ok"},
        ],
        [{"role": "assistant", "content": [CALL]}, {"role": "system", "content": []}],
    ],
)
def test_no_answer_follows_a_call_without_its_result(turns: list[dict[str, Any]]) -> None:
    with pytest.raises(ApiError, match="tool_result") as caught:
        read_answerable(parsed({"messages": [USER, *turns]}))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    answered = {"role": "user", "content": [RESULT]}
    assert read_answerable(parsed({"messages": [USER, *turns, answered]})).add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "args"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ],
)
def test_thinking_and_effort_are_variables_of_the_template(fields: dict[str, Any], args: dict[str, Any]) -> None:
    assert read(USER, **fields).template_args == args


def test_tools_are_the_clients_own() -> None:
    function = {"name": "weather", "description": "Weather now.", "parameters": SCHEMA}
    chat = read(USER, tools=[SEARCH, {**TOOL, "type": "custom", "strict": True}])
    assert chat.tools == [{"type": "function", "function": function}]
    assert read(USER, tools=[TOOL], tool_choice={"type": "none"}).tools is None
    assert read(USER, tools=[SEARCH]).tools is None
    assert read(USER, tools=[{**SEARCH, "name": 5, "input_schema": "x"}, TOOL]).tools == [
        {"type": "function", "function": function}
    ]


LATE = {**TOOL, "name": "late", "defer_loading": True}


def names(*turns: dict[str, Any], tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in read(*turns, tools=tools).tools or ()]


def test_a_deferred_tool_is_there_once_the_conversation_names_it() -> None:
    call = {"role": "assistant", "content": [CALL]}
    found = {"role": "user", "content": [{**RESULT, "content": [{"type": "tool_reference", "tool_name": "late"}]}]}
    assert names(USER, tools=[TOOL, LATE]) == ["weather"]
    assert names(USER, call, found, tools=[TOOL, LATE]) == ["weather", "late"]
    assert read(USER, call, found, tools=[TOOL, LATE]).messages[2].content == "late"
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    assert names(USER, tools=[search, TOOL, LATE]) == ["weather", "late"]


def test_tools_come_and_go_within_a_conversation() -> None:
    def change(kind: str, name: str) -> dict[str, Any]:
        block = {"type": kind, "tool": {"type": "tool_reference", "name": name}}
        return {"role": "system", "content": [block]}

    assert names(USER, change("tool_addition", "late"), tools=[TOOL, LATE]) == ["weather", "late"]
    assert names(USER, change("tool_removal", "weather"), tools=[TOOL, LATE]) == []
    both = (change("tool_removal", "weather"), change("tool_addition", "weather"))
    assert names(USER, *both, tools=[TOOL]) == ["weather"]
    assert read(USER, change("tool_removal", "weather"), tools=[TOOL]).messages == read(USER).messages


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse({"weather": SCHEMA})),
        ({"type": "auto"}, ToolUse({"weather": SCHEMA})),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolUse({"weather": SCHEMA}, many=False)),
        ({"type": "any"}, ToolUse({"weather": SCHEMA}, True)),
        ({"type": "tool", "name": "weather"}, ToolUse({"weather": SCHEMA}, True, "weather")),
        ({"type": "none"}, ToolUse({}, False)),
    ],
)
def test_the_choice_of_tools(choice: dict[str, Any] | None, use: ToolUse) -> None:
    assert tool_use_of(parsed({"tools": [SEARCH, TOOL], "tool_choice": choice})) == use


def test_only_what_the_client_gives_replaces_the_models_defaults() -> None:
    assert parsed({}).sampling().model_fields_set == {"stop"}
    given = parsed({"temperature": 0, "top_k": 3, "top_p": 0.5, "stop_sequences": ["END", ""]}).sampling()
    assert (given.temperature, given.top_k, given.top_p, given.stop) == (0, 3, 0.5, ["END"])
    assert given.model_fields_set == {"stop", "temperature", "top_k", "top_p"}


@pytest.mark.parametrize("name", ["output_config.format", "output_format"])
def test_a_schema_becomes_a_grammar(name: str) -> None:
    asked = {"type": "json_schema", "schema": SCHEMA}
    body = {"output_config": {"format": asked}} if "." in name else {name: asked}
    grammar = parsed(body).grammar()
    assert grammar is not None
    assert (grammar.kind, grammar.field) == ("json_schema", name)
    assert parsed({"output_config": {"effort": "low"}}).grammar() is None
    assert parsed({**body, "tools": [TOOL], "tool_choice": {"type": "none"}}).grammar() == grammar
    assert refusal({**body, "tools": [TOOL]}).param == name


def test_long_texts_are_packed() -> None:
    long = "ü" * (LONG_CHARACTERS + 1)
    chat = read({"role": "user", "content": [text(long), text("b")]}, system=long)
    assert isinstance(chat.messages[0].content, PackedText)
    assert isinstance(chat.messages[1].content, list)
    assert isinstance(chat.messages[1].content[0], PackedText)


def with_block(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "Hi."}, {"role": role, "content": [text("a"), block]}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa=="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "x"}, "title": "t", "citations": {"enabled": True}}
REFERENCE = {"type": "tool_reference", "name": "weather"}
HERE = "messages[2].content[1]"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "is required"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, "messages", "too many"),
        ({"messages": [{"role": "user", "content": [text("a")] * (MAX_PARTS + 1)}]}, "messages[0].content", "too many"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", ""),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        (
            {"messages": [USER, {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "x"}}]}]},
            "messages[1].content[0].tool.type",
            "",
        ),
        (with_block(IMAGE), f"{HERE}.type", '"image" is not served'),
        (with_block(DOCUMENT), f"{HERE}.type", '"document" is not served'),
        (with_block({"type": "thinking", "thinking": "a"}), f"{HERE}.type", '"thinking" is not served'),
        (with_block({"type": "text"}), f"{HERE}.text", "is required"),
        (with_block({"type": "tool_result"}), f"{HERE}.tool_use_id", "is required"),
        (with_block({**RESULT, "content": [IMAGE]}), f"{HERE}.content[0].type", '"image" is not served'),
        (with_block({**CALL, "input": None}, "assistant"), f"{HERE}.input", "is required"),
        (with_block({**CALL, "input": "{}"}, "assistant"), f"{HERE}.input", "must be an object"),
        (with_block(RESULT, "assistant"), f"{HERE}.type", '"tool_result" is not served'),
        ({"messages": [{"role": "assistant", "content": [CALL] * (MAX_TOOL_CALLS + 1)}]}, "messages[0].content", "256"),
        ({"system": [{"type": "image", "text": "a"}]}, "system[0].type", ""),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required"),
        ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name", "is required"),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools", "too many"),
        ({"tools": [{**TOOL, "description": "y" * 600_000}] * 2}, "tools", "characters"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "is required"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type", ""),
        ({"thinking": {"type": 1}}, "thinking.type", "'enabled', 'disabled' or 'adaptive'"),
        ({"thinking": {"type": "off"}}, "thinking.type", "'enabled', 'disabled' or 'adaptive'"),
        ({"tools": [TOOL, SEARCH, TOOL]}, "tools", 'two tools of the name "weather"'),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "weather"}}, "tool_choice.name", '"tool"'),
        (with_block({"type": "tool_result", "tool_use_id": "a", "text": "20"}), f"{HERE}.text", "does not belong"),
        (with_block(text("b", tool=REFERENCE)), f"{HERE}.tool", "does not belong"),
        (with_block({**CALL, "content": "20"}, "assistant"), f"{HERE}.content", "does not belong"),
        (with_block({**RESULT, "content": [text("b", tool_name="f")]}), f"{HERE}.content[0].tool_name", "not belong"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences", "too many"),
        ({"stop_sequences": ["x" * 1025]}, "stop_sequences[0]", "1024"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"container": "c1"}, "container", "does not serve"),
        ({"output_config": {"effort": "a lot"}}, "output_config.effort", "'xhigh' or 'max'"),
        ({"tools": [{"type": 5, "name": "f", "input_schema": SCHEMA}]}, "tools[0].type", "must be a string"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "is required"),
        ({"temprature": 1}, "temprature", "did you mean"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], param: str, says: str) -> None:
    error = refusal(body)
    assert error.param == param, error.message
    assert says in error.message
