"""The conversations that each chat template renders: one of each kind, as clients send them.

Every text has a word of its own, so that it is found in what a template makes of it.
"""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]


def _call(call_id: str, name: str, **arguments: Any) -> Body:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(role: str, content: str, **more: Any) -> Body:
    return {"role": role, "content": content, **more}


def _parts(role: str, *texts: str) -> Body:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def _tool(name: str, description: str, **properties: Body) -> Body:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SYSTEM = _text("system", "Answer in one violet sentence.")
USER, NEXT = _text("user", "Which amber town is it?"), _text("user", "And which cobalt river?")
ASSISTANT = _text("assistant", "It is the crimson one.")
TOOLS = [
    _tool("get_weather", "Tell the pewter weather.", city={"type": "string", "description": "Name of a city."}),
    _tool("add_numbers", "Add <b>numbers</b> & tell.", numbers={"type": "array", "items": {"type": "integer"}}),
]
CALL = {"role": "assistant", "tool_calls": [_call("call00001", "get_weather", city="Oslo")]}
RESULT = {"role": "tool", "content": '{"degrees": "twenty olive"}', "tool_call_id": "call00001", "name": "get_weather"}
TWO_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [_call("call00001", "get_weather", city="Rome"), _call("call00002", "add_numbers", numbers=[4711])],
}
TWO_RESULTS = [
    {"role": "tool", "content": "sunny maroon", "tool_call_id": "call00001"},
    {"role": "tool", "content": "three indigo", "tool_call_id": "call00002"},
]
ODD = " \t<b>é</b> &amp; 'quoted' \"twice\" 日本語 \U0001f600 عربى e\u0301 {{ braces }} {% if %} \\n <|im_end|> [INST] "

KINDS: dict[str, Body] = {
    "plain": {"messages": [USER, ASSISTANT, NEXT]},
    "system": {"messages": [SYSTEM, USER]},
    "several systems": {"messages": [SYSTEM, USER, ASSISTANT, _text("system", "From here in teal words."), NEXT]},
    "parts": {
        "messages": [_parts("system", "Be a lilac."), _parts("user", "First, a coral reef.", "Then a jade gate.")]
    },
    "empty": {"messages": [_text("system", ""), USER, _text("assistant", ""), NEXT]},
    "unicode": {"messages": [_text("system", f"scarlet{ODD}mauve "), _text("user", f"{ODD}ochre ")]},
    "tools ignored": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "tools used": {"messages": [USER, {**CALL, "content": ""}, RESULT, ASSISTANT, NEXT], "tools": TOOLS},
    "prefill": {"messages": [USER, _text("assistant", "The lavender town ")], "continue_final_message": True},
    "thinking": {
        "messages": [USER, {**ASSISTANT, "reasoning_content": "Let me see the tan map."}, NEXT],
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "tool results": {"messages": [SYSTEM, USER, TWO_CALLS, *TWO_RESULTS], "tools": TOOLS},
    "null content": {"messages": [USER, {**CALL, "content": None}, RESULT], "tools": TOOLS},
    "words and call": {"messages": [USER, {**CALL, "content": "Let me ask the beige mast."}, RESULT], "tools": TOOLS},
    "null and thought": {"messages": [USER, {"role": "assistant", "content": None, "reasoning_content": "Hm."}, NEXT]},
}
