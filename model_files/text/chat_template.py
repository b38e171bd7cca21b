"""Turns a conversation into the text that the model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...messages.requests import ChatMessage
from .errors import PromptError, TokenizerLoadError

FIELD = "messages"
# What running a template on a conversation that it was not written for can raise.
RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
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

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The text, up to where the assistant begins to speak; raises ``PromptError`` with its own words."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                **self._special_tokens, messages=turns, tools=None, documents=None, add_generation_prompt=True
            )
        except RENDER_ERRORS as e:
            raise PromptError(FIELD, f"the model's chat template refuses this conversation: {e}") from e


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it this way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that published templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which no model has seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
