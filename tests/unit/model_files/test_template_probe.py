"""What a chat template prints of a conversation: all of it, in the form that the template reads, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.messages.conversation import ChatMessage, ChatToolCall, Conversation
from pdserve.model_files.text import template_probe
from pdserve.model_files.text.chat_template import ChatTemplate
from pdserve.model_files.text.errors import PromptError
from pdserve.model_files.text.template_probe import TemplateProbe

PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}[end]"
)
STRINGS_ONLY = "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}"
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
CALLS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALL = ChatToolCall("c1", "now", {})
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {}}}


def render(source: str, *messages: ChatMessage, **options: Any) -> str:
    return ChatTemplate(source, {}).render(Conversation(list(messages), **options))


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (PARTS_ONLY, "is this safe?", "[user]is this safe?[end]"),
        (PARTS_ONLY, ["is this ", "safe?"], "[user]is this safe?[end]"),
        (STRINGS_ONLY, "a", "<user>a"),
        (STRINGS_ONLY, ["a", "b"], "<user>a\nb"),
        (STRINGS_ONLY, ["", " "], "<user>"),
        (BOTH, "a", "<user>a"),
        (BOTH, ["a", "b"], "<user>ab"),
        (FIRST_PART, ["a", "b"], "<user>a\nb"),
        (FIRST_PART, "a", "<user>a"),
        (CALLS, ["a", "b"], "<user>a\nb"),
    ],
)
def test_content_is_given_in_the_form_that_the_template_reads(source: str, content: Any, text: str) -> None:
    assert render(source, ChatMessage("user", content)) == text


def test_each_message_has_the_form_that_its_role_needs() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '|' }}{% else %}{{ m.content[0]['text'] }}"
        "{% endif %}{% endfor %}"
    )
    messages = ChatMessage("system", ["be", "brief"]), ChatMessage("user", "hi")
    assert render(source, *messages) == "be\nbrief|hi"


def test_a_list_is_not_printed_as_python_or_json_writes_it() -> None:
    messages = ChatMessage("assistant", None, tool_calls=[CALL]), ChatMessage("tool", ["it is", "noon"])
    assert render(CALLS, *messages) == '<assistant>{"name": "now", "arguments": {}}<tool>"it is\\nnoon"'


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.content is defined }};{% endfor %}", "False;"),
        ("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}", "x"),
        ("{% for m in messages %}{{ m.content[0].text + 'x' }}{% endfor %}", "x"),
    ],
)
def test_missing_content_is_empty_for_templates_that_need_some(source: str, text: str) -> None:
    assert render(source, ChatMessage("assistant", None)) == text


FIRST_SYSTEM = (
    "{{ messages[0].content }}{% for m in messages[1:] %}{% if m.role != 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "messages", "what"),
    [
        (
            FIRST_SYSTEM,
            [("system", "a"), ("user", "b"), ("system", "c")],
            r"the content of messages\[2\] \(role system",
        ),
        ("{{ messages[-1].content }}", [("user", "a"), ("user", "a")], r"messages\[0\] \(role user\)"),
        ("{{ messages[0].content[1].text }}", [("user", ["a", "b"])], r"part 0 of messages\[0\]"),
        ("x", [("user", "x")], r"messages\[0\]"),
    ],
)
def test_lost_content_is_refused_by_name(source: str, messages: list[tuple[str, Any]], what: str) -> None:
    with pytest.raises(PromptError, match=f"does not print .*{what}.*--chat-template") as refused:
        render(source, *(ChatMessage(role, content) for role, content in messages))
    assert refused.value.field == "messages"


def test_lost_calls_are_refused_by_name() -> None:
    with pytest.raises(PromptError, match=r"the tool calls of messages\[1\]"):
        render(STRINGS_ONLY, ChatMessage("user", "a"), ChatMessage("assistant", "b", tool_calls=[CALL]))
    with pytest.raises(PromptError, match=r"the tool calls of messages\[1\]"):
        render(PARTS_ONLY, ChatMessage("user", "a"), ChatMessage("assistant", "b", tool_calls=[CALL]))


def test_text_beside_calls_becomes_a_turn_of_its_own_where_it_would_be_lost() -> None:
    message = ChatMessage("assistant", "b", tool_calls=[CALL])
    assert render(CALLS, message) == '<assistant>b<assistant>{"name": "now", "arguments": {}}'
    no_two = "{% if messages | length > 1 %}{{ raise_exception('two') }}{% endif %}" + CALLS
    with pytest.raises(PromptError, match=r"the content of messages\[0\]"):
        render(no_two, message)


ONE_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
)


def test_several_calls_stand_before_their_results_where_only_one_is_printed() -> None:
    calls = [ChatToolCall("c1", "now", {}), ChatToolCall("c2", "then", {})]
    asked = ChatMessage("assistant", "b", tool_calls=calls)
    results = [ChatMessage("tool", text, tool_call_id=i) for text, i in (("noon", "c1"), ("dawn", "c2"))]
    assert render(ONE_CALL, asked, *results) == "<assistant>bnow<tool>noon<assistant>then<tool>dawn"
    one = ChatMessage("assistant", None, tool_calls=calls[:1])
    assert render(ONE_CALL, one, ChatMessage("user", "a"), asked, *results).startswith("<assistant>now<user>a<ass")
    for wrong in (results[:1], results[::-1]):
        with pytest.raises(PromptError, match=r"the tool calls of messages\[0\]"):
            render(ONE_CALL, asked, *wrong)


def test_a_call_without_an_id_has_none() -> None:
    call = ChatMessage("assistant", None, tool_calls=[ChatToolCall("", "now", {})])
    assert render("{{ messages[0].tool_calls[0].id is defined }}" + ONE_CALL, call) == "False<assistant>now"


@pytest.mark.parametrize(("call_id", "printed"), [("c1", "functions.now:0"), ("functions.now:7", "functions.now:7")])
def test_ids_tell_the_names_of_calls_where_the_template_prints_only_ids(call_id: str, printed: str) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.id }}{% endfor %};{{ m.tool_call_id }}"
        "{% endfor %}"
    )
    calling = ChatMessage("assistant", None, tool_calls=[ChatToolCall(call_id, "now", {})])
    assert render(source, calling, ChatMessage("tool", "noon", tool_call_id=call_id)) == f"{printed};noon;{printed}"


def test_reasoning_that_a_template_refuses_is_left_out() -> None:
    source = (
        "{% for m in messages %}{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
        "{{ m.thinking }}{{ m.content }}{% endfor %}"
    )
    assert render(source, ChatMessage("assistant", "b", reasoning_content="hm")) == "b"
    assert render(source, ChatMessage("assistant", None, reasoning_content="hm")) == "hm"


def test_lost_arguments_and_second_tools_are_refused_by_name() -> None:
    calling = ChatMessage("assistant", "b", tool_calls=[ChatToolCall("c1", "now", {"city": "Rome"})])
    with pytest.raises(PromptError, match=r"the tool calls of messages\[0\]"):
        render(ONE_CALL, calling)
    letter = ChatMessage("assistant", "b", tool_calls=[ChatToolCall("c1", "now", {"n": "w"})])
    with pytest.raises(PromptError, match=r"the tool calls of messages\[0\]"):
        render(ONE_CALL, letter)
    first = "{{ tools[0] | tojson }}{{ messages[0].content }}"
    then: dict[str, Any] = {"type": "function", "function": {"name": "then", "parameters": {}}}
    assert '"now"' in render(first, ChatMessage("user", "a"), tools=[TOOL])
    with pytest.raises(PromptError, match="does not print the tools"):
        render(first, ChatMessage("user", "a"), tools=[TOOL, then])


def test_arguments_are_text_for_templates_that_need_text() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}{% endfor %}"
    )
    calling = ChatMessage("assistant", "b", tool_calls=[ChatToolCall("c1", "now", {"city": "Köln"})])
    assert render(source, calling) == 'bnow({"city": "Köln"})'


def test_lost_tools_are_refused_by_name() -> None:
    source = "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    assert '"now"' in render(source, ChatMessage("system", "a"), tools=[TOOL])
    with pytest.raises(PromptError, match="does not print the tools") as refused:
        render(source, ChatMessage("user", "a"), tools=[TOOL])
    assert refused.value.field == "tools"


def test_reasoning_may_be_left_out_and_has_every_name() -> None:
    thinking = ChatMessage("assistant", "b", reasoning_content="hm")
    assert render(STRINGS_ONLY, thinking) == "<assistant>b"
    for name in ("thinking", "reasoning", "reasoning_content"):
        assert render("{{ messages[0]." + name + " }}{{ messages[0].content }}", thinking) == "hmb"


def test_a_template_that_refuses_numbers_has_the_last_word() -> None:
    source = "{% if messages[0].content != 'a' %}{{ raise_exception('only a') }}{% endif %}a"
    assert render(source, ChatMessage("user", "a")) == "a"
    with pytest.raises(PromptError, match="only a"):
        render(source, ChatMessage("user", "b"))


def test_a_last_message_in_parts_can_be_continued() -> None:
    messages = ChatMessage("user", "a"), ChatMessage("assistant", ["b", "c "])
    assert render(BOTH + "!", *messages, continue_final_message=True) == "<user>a<assistant>bc "
    assert render(PARTS_ONLY, *messages, continue_final_message=True) == "[user]a[assistant]bc "


def test_conversations_with_the_same_skeleton_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Conversation] = []

    def render(chat: Conversation, turns: list[dict[str, Any]]) -> str:
        rendered.append(chat)
        return "".join(turn["content"] for turn in turns)

    def probe_renders(*contents: str) -> int:
        rendered.clear()
        probe.find_plan(Conversation([ChatMessage("user", content) for content in contents]))
        return len(rendered)

    monkeypatch.setattr(template_probe, "MAX_ANSWERS", 2)
    probe = TemplateProbe(render)
    assert [probe_renders("a"), probe_renders("b"), probe_renders("a", "a"), probe_renders("")] == [1, 0, 1, 1]
    assert [probe_renders("", ""), probe_renders("c"), probe_renders("", "")] == [1, 1, 0]
    assert not any("a" in str(chat.messages[0].content) for chat in rendered)
