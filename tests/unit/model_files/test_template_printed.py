"""Texts that a chat template loses for what they say: the rendering lacks their beginning or end, a 400."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.messages.conversation import ChatMessage, ChatToolCall, Conversation
from pdserve.model_files.text.chat_template import ChatTemplate
from pdserve.model_files.text.errors import PromptError

LONG = "Beginning of a text. " + "It has much to say. " * 200 + "And this is its end."
ODD = " \t<b>é</b> &amp; 'quoted' \"twice\" 日本語 \U0001f600 e\u0301 {{ braces }} \\n <|im_end|> [INST] /no_think "


def printing(expression: str) -> ChatTemplate:
    return ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ " + expression + " }}{% endfor %}", {})


def render(template: ChatTemplate, *messages: tuple[str, str], **options: Any) -> str:
    return template.render(Conversation([ChatMessage(*message) for message in messages], **options))


@pytest.mark.parametrize(
    "expression",
    [
        "m.content",
        "m.content | trim",
        "m.content | tojson",
        "m.content | tojson(ensure_ascii=true)",
        "m | tojson",
        "m | string",
        "m.content | e",
        "m.content | upper",
        "m.content | replace('<|im_end|>', '') | replace('/no_think', '')",
        "m.content.split() | join(' ')",
        "m.content | indent(4)",
    ],
)
@pytest.mark.parametrize(
    "text", [LONG, ODD, f"{ODD}{LONG}{ODD}", "a\nb", "?!", "/no_think", "<|im_end|>", "\ud800x", ""]
)
def test_a_text_may_be_trimmed_escaped_and_freed_of_control_tokens(expression: str, text: str) -> None:
    assert render(printing(expression), ("system", text), ("user", text)).startswith(("<system>", "&lt;system&gt;"))


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("m.content.split('</think>')[-1]", "please explain the </think> tag"),
        ("m.content[:30]", LONG),
        ("m.content[-60:]", LONG),
        ("m.content.split('\n')[0]", "one line\nanother line"),
        ("m.content if 'weather' not in m.content", "weather?"),
        ("m.content | int", "hello"),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_text_without_its_beginning_or_end_is_refused(expression: str, text: str, role: str) -> None:
    with pytest.raises(PromptError, match=rf"does not print all of the content of messages\[0\] \(role {role}\)"):
        render(printing(expression), (role, text))


def test_reasoning_may_be_cut_out_of_the_assistants_text() -> None:
    template = printing("m.content.split('</think>')[-1]")
    assert render(template, ("assistant", "hm, so </think>yes"), ("user", "why?")) == "<assistant>yes<user>why?"


@pytest.mark.parametrize("text", ["Title\xa0of\na page", "a\u200bb\tc", "\x85 é\nb"])
@pytest.mark.parametrize("expression", ["m.content | tojson", "m.content | tojson | tojson", "m.content | string"])
def test_json_may_have_spaces_and_marks_that_python_escapes(expression: str, text: str) -> None:
    assert render(printing(expression), ("tool", text)).startswith("<tool>")


WEATHER = (
    "{% if 'weather' not in messages[-1].content %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}"
)
TYPES = "{% for t in tools %}{{ t.function.name ~ t.function.parameters.properties.q.type[0] }}{% endfor %}"
CITIES = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city.upper() }}{% endfor %}"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_texts_are_looked_for_where_the_template_refuses_numbers(role: str) -> None:
    template = ChatTemplate(WEATHER, {})
    assert render(template, ("user", "weather?")) == "weather?"
    with pytest.raises(PromptError, match=rf"does not print all of .*messages\[0\] \(role {role}\)"):
        render(template, (role, "never shown"), ("user", "weather?"))


def test_reasoning_may_be_cut_off_where_the_template_refuses_numbers() -> None:
    cutting = WEATHER + "{{ messages[0].content.split('</think>')[-1] }}"
    answer = "long thoughts about rain and sun </think>yes"
    assert render(ChatTemplate(cutting, {}), ("assistant", answer), ("user", "weather?")) == "weather?yes"


def test_texts_are_looked_for_where_the_template_needs_certain_arguments() -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    assert render(ChatTemplate(TYPES + USERS, {}), ("user", "hi"), tools=tools) == "nowshi"
    with pytest.raises(PromptError, match=r"messages\[0\] \(role system\)"):
        render(ChatTemplate(TYPES + USERS, {}), ("system", "never shown"), ("user", "hi"), tools=tools)
    calling = ChatMessage("assistant", None, tool_calls=[ChatToolCall("c1", "now", {"city": "Rome"})])
    template = ChatTemplate("{{ 'city ' }}" + CITIES + USERS, {})
    assert template.render(Conversation([calling, ChatMessage("user", "hi")])) == "city ROMEhi"
    with pytest.raises(PromptError, match=r"messages\[0\] \(role system\)"):
        template.render(Conversation([ChatMessage("system", "never shown"), calling, ChatMessage("user", "hi")]))


def test_a_tool_beyond_the_second_is_looked_for() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("one", "two", "three")]
    template = ChatTemplate("{{ tools[:2] | tojson }}{{ messages[0].content }}", {})
    with pytest.raises(PromptError, match="does not print all of the tools") as refused:
        render(template, ("user", "hi"), tools=tools)
    assert refused.value.field == "tools"
