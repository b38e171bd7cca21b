"""Turns a conversation into the text that the model was trained to continue."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2

from ...messages.conversation import Conversation
from ..errors import brief
from .errors import PromptError, TokenizerLoadError
from .jinja_environment import make_environment
from .named_templates import NamedTemplates
from .printed import check_printed
from .template_probe import TemplateProbe

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


class ChatTemplates:
    """The compiled templates of a model."""

    def __init__(self, sources: NamedTemplates, special_tokens: Mapping[str, str]) -> None:
        """Compile the templates; raises ``TokenizerLoadError``.

        ``special_tokens``: variables that they may print, by name.
        """
        self._default = ChatTemplate(sources.default, special_tokens, sources.origin)
        self._with_tools = self._default
        if sources.tool_use is not None:
            self._with_tools = ChatTemplate(sources.tool_use, special_tokens, f"{sources.origin} (tool_use)")

    def render(self, chat: Conversation) -> str:
        """Return the text that the template makes of ``chat``, for the model to continue; raises ``PromptError``."""
        return (self._default if chat.tools is None else self._with_tools).render(chat)


class ChatTemplate:
    """A compiled template, run in a sandbox: it comes with a model that anyone may have published."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str = "the chat template") -> None:
        """Compile the template ``source``; raises ``TokenizerLoadError``, which names ``origin``.

        ``special_tokens`` are variables that the template may print.
        """
        self._special_tokens = special_tokens
        self._probe = TemplateProbe(self._render)
        try:
            self._template = make_environment().from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerLoadError(f"{origin} is wrong in line {e.lineno}: {brief(e)}; see --chat-template") from e
        except (SyntaxError, *RENDER_ERRORS) as e:
            raise TokenizerLoadError(f"{origin} can't be compiled: {brief(e)}; see --chat-template") from e

    def render(self, chat: Conversation) -> str:
        """Return the text that the template makes of ``chat``, for the model to continue.

        Raises ``PromptError``: with the template's own message, or because it does not print all of ``chat``.
        """
        self._check_args(chat)
        plan = self._probe.find_plan(chat)
        turns = plan.make_turns(chat)
        make = self._cut_in_final_message if chat.continue_final_message else self._render
        text = make(chat, turns)
        # Numbers in place of texts don't tell what becomes of a text with, say, "</think>" in it.
        check_printed(chat, text, with_assistant=not plan.is_probed)
        return text

    def _cut_in_final_message(self, chat: Conversation, turns: list[dict[str, Any]]) -> str:
        """Render up to the end of the last message's content, wherever the template puts it.

        A mark at that end is searched in the text. The content itself may have been trimmed, or occur twice. A space
        behind the mark tells whether the template trims content, as that before the mark has to be trimmed, too.
        """
        mark = secrets.token_hex(16)
        content = turns[-1].get("content", "")
        if isinstance(content, list):
            text = content[-1]["text"]
            content[-1]["text"] = f"{text}{mark} "
        else:
            text = content
            turns[-1]["content"] = f"{text}{mark} "
        before, found, after = self._render(chat, turns).partition(mark)
        # A template may take content apart, as at </think>. Then the answer would not go on with what the client sent.
        if not found or mark in after or text.strip() not in before:
            raise PromptError(
                "continue_final_message", "the model's chat template does not print the last message as it is"
            )
        return before if after.startswith(" ") else before.rstrip()

    def _check_args(self, chat: Conversation) -> None:
        """Raise ``PromptError`` if a variable of the request replaces what the template calls or prints of its own."""
        taken = (RESERVED | self._template.globals.keys() | self._special_tokens.keys()) & chat.template_args.keys()
        if taken:
            owner = "a field of the request itself" if RESERVED & taken else "the model's own"
            raise PromptError(ARGS_FIELD, f"{ARGS_FIELD}: {min(taken)} is {owner}")

    def _render(self, chat: Conversation, turns: list[dict[str, Any]]) -> str:
        usual = {"tools": chat.tools, "documents": None, **self._special_tokens, **chat.template_args}
        generation = chat.add_generation_prompt and not chat.continue_final_message
        try:
            return _joined(self._template.generate(usual, messages=turns, add_generation_prompt=generation))
        except RENDER_ERRORS as e:
            reason = str(e) or type(e).__name__
            raise PromptError(FIELD, f"the model's chat template refuses this conversation: {reason}") from e


def _joined(pieces: Iterable[str]) -> str:
    """Join a template's output. Raises ``ValueError`` above ``MAX_CHARACTERS``, because it may have no end."""
    parts, size = list[str](), 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise ValueError(f"it makes more than {MAX_CHARACTERS} characters of it")
        parts.append(piece)
    return "".join(parts)
