"""Turns a conversation into the text that the model was trained to continue."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...messages.conversation import ChatMessage, Conversation
from ...messages.packed_text import unpack
from .errors import PromptError, TokenizerLoadError

FIELD = "messages"
ARGS_FIELD = "chat_template_kwargs"
RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message"})
"""Variables of every template that a request has fields of its own for."""
MAX_CHARACTERS = 1 << 24
"""Maximum length of what a template makes of a conversation: more than any context holds."""
# What running a template on a conversation that it was not written for can raise.
RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template, run in a sandbox: it comes with a model that anyone may have published."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile; raises ``TokenizerLoadError``. ``special_tokens`` are variables that the template may print."""
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerLoadError(f"the chat template is wrong in line {e.lineno}: {e}; see --chat-template") from e

    def render(self, chat: Conversation) -> str:
        """Render the text that the model continues; raises ``PromptError`` with the template's own message."""
        if chat.continue_final_message:
            return self._cut_in_final_message(chat)
        return self._render(chat, [_turn(message) for message in chat.messages])

    def _cut_in_final_message(self, chat: Conversation) -> str:
        """Render up to the end of the last message's content, wherever the template puts it.

        A mark at that end is searched in the text. The content itself may have been trimmed, or occur twice.
        """
        turns = [_turn(message) for message in chat.messages]
        mark = secrets.token_hex(16)
        turns[-1]["content"] = (turns[-1]["content"] or "") + mark
        before, found, after = self._render(chat, turns).partition(mark)
        if not found or mark in after:
            raise PromptError(
                "continue_final_message", "the model's chat template does not print the last message as it is"
            )
        return before

    def _render(self, chat: Conversation, turns: list[dict[str, Any]]) -> str:
        # What a template calls or prints of its own accord is not a client's to replace.
        taken = (RESERVED | self._template.globals.keys() | self._special_tokens.keys()) & chat.template_args.keys()
        if taken:
            owner = "a field of the request itself" if RESERVED & taken else "the model's own"
            raise PromptError(ARGS_FIELD, f"{ARGS_FIELD}: {min(taken)} is {owner}")
        usual = {"tools": chat.tools, "documents": None, **self._special_tokens, **chat.template_args}
        generation = chat.add_generation_prompt and not chat.continue_final_message
        try:
            return _joined(self._template.generate(usual, messages=turns, add_generation_prompt=generation))
        except RENDER_ERRORS as e:
            reason = str(e) or type(e).__name__
            raise PromptError(FIELD, f"the model's chat template refuses this conversation: {reason}") from e


def _joined(pieces: Iterable[str]) -> str:
    """Join a template's output, as far as it has an end."""
    parts, size = list[str](), 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise ValueError(f"it makes more than {MAX_CHARACTERS} characters of it")
        parts.append(piece)
    return "".join(parts)


def _turn(message: ChatMessage) -> dict[str, Any]:
    """Make the message that templates see. Missing fields are left out, because templates ask for defined ones."""
    turn: dict[str, Any] = {
        "role": message.role,
        "content": None if message.content is None else unpack(message.content),
    }
    if message.name is not None:
        turn["name"] = message.name
    if message.reasoning_content is not None:
        turn["reasoning_content"] = unpack(message.reasoning_content)
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it this way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment that published templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # text without end, which no template for models has a use for
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model has seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
