"""Texts with two calls of tools, in each output format."""

from __future__ import annotations

import json

from pdserve.server.output_parsers.base import ParseRequest
from pdserve.server.output_parsers.events import ToolCall

TOOLS = {
    "find": {
        "type": "object",
        "properties": {"word": {"type": "string"}, "most": {"type": "integer"}, "deep": {"type": "boolean"}},
    },
    "now": {},
}
REQUEST = ParseRequest(TOOLS)
ARGUMENTS = '{"word": "sea \\"lion\\"", "most": 3, "deep": true}'
CALL = ToolCall("find", ARGUMENTS)
NOW = ToolCall("now", "{}")
DSML = "｜DSML｜"

TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": §}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
    "qwen3_coder": '<tool_call>\n<function=find>\n<parameter=word>\nsea "lion"\n</parameter>\n<parameter=most>\n3\n'
    "</parameter>\n<parameter=deep>\nTrue\n</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>",
    "glm": '<tool_call>find\n<arg_key>word</arg_key>\n<arg_value>sea "lion"</arg_value>\n<arg_key>most</arg_key>\n'
    "<arg_value>3</arg_value>\n<arg_key>deep</arg_key>\n<arg_value>true</arg_value>\n</tool_call><tool_call>now</tool_call>",
    "mistral": "[TOOL_CALLS]find[ARGS]§[TOOL_CALLS]now{}",
    "granite": '<|tool_call|>[{"name": "find", "arguments": §}, {"name": "now", "arguments": {}}]',
    "phi4": '<|tool_call|>[{"name": "find", "parameters": §}, {"name": "now"}]<|/tool_call|>',
    "llama3_json": '{"name": "find", "parameters": §}; {"name": "now", "parameters": {}}',
    "pythonic": "[find(word='sea \"lion\"', most=3, deep=True), now()]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n§\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": f'<{DSML}function_calls>\n<{DSML}invoke name="find">\n<{DSML}parameter name="word" string="true">'
    f'sea "lion"</{DSML}parameter>\n<{DSML}parameter name="most" string="false">3</{DSML}parameter>\n<{DSML}parameter '
    f'name="deep" string="false">true</{DSML}parameter>\n</{DSML}invoke>\n<{DSML}invoke name="now">\n</{DSML}invoke>\n'
    f"</{DSML}function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>§"
    "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "gemma4": '<|tool_call>call:find{word:<|"|>sea "lion"<|"|>,most:3,deep:true}<tool_call|><|tool_call>call:now{}'
    "<tool_call|>",
    "gpt_oss": "<|channel|>commentary to=functions.find <|constrain|>json<|message|>§<|call|><|start|>assistant"
    "<|channel|>commentary to=functions.now<|message|>{}",
}
"""Two calls in each format; § stands for the arguments of the first."""


def two_calls(name: str) -> str:
    return TWO_CALLS[name].replace("§", ARGUMENTS)


def as_values(calls: list[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]
