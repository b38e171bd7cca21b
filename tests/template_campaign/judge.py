"""Compares pdserve's rendering of a conversation with that of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from pdserve.messages.conversation import Conversation
from pdserve.model_files.text.chat_template import ChatTemplate
from pdserve.model_files.text.errors import PromptError
from pdserve.server.http.errors import ApiError
from pdserve.server.http.generation.tool_use import make_reader
from pdserve.server.http.openai.chat import chat_of
from pdserve.server.http.openai.message_parts import tool_use_of
from pdserve.server.http.openai.schemas import ChatBody
from pdserve.server.output_parsers.choice import AUTO, choose_formats

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
LISTS = "content, which it prints as a list"


class Verdict(Enum):
    """What a comparison found. The value is its letter in the table."""

    EQUAL = "="
    REFUSED = "r"
    """pdserve refuses what transformers refuses as well, or what transformers does not print completely."""
    EXEMPT = "x"
    """Equal to transformers' rendering of the same texts in another form. It loses the given one, or refuses it."""
    DIFFERENT = "D"
    UNFOUNDED = "U"
    """pdserve refuses what transformers prints completely."""


@dataclass(frozen=True)
class Comparison:
    """A verdict, and why: ``group`` in a few words, ``reason`` in full."""

    verdict: Verdict
    group: str = ""
    reason: str = ""
    ours: str = ""
    theirs: str = ""


class Refused(Exception):
    """One of the two refuses to render the conversation."""


def compare(source: str, body: Mapping[str, Any]) -> Comparison:
    """Compare the renderings of a body by the template ``source``."""
    theirs, their_reason = _attempt(render_by_transformers, source, body["messages"], body)
    ours, our_reason = _attempt(render_by_pdserve, source, body)
    lost = "" if theirs is None else ", ".join(find_lost(theirs, body))
    if ours is None:
        reason = f"{our_reason} | transformers: {their_reason or f'loses {lost}'}"
        if theirs is None:
            return Comparison(Verdict.REFUSED, "both refuse it", reason)
        if "is not known" in our_reason:
            return Comparison(Verdict.REFUSED, "the format of its tool calls is not known", reason)
        if lost:
            return Comparison(Verdict.REFUSED, "transformers loses a part of it", reason)
        return Comparison(Verdict.UNFOUNDED, our_reason, reason, theirs=theirs)
    if ours == theirs:
        return Comparison(Verdict.EQUAL, ours=ours)
    chat = chat_of(ChatBody.model_validate(body))
    in_our_form, _ = _attempt(render_by_transformers, source, _turns(source, chat), body)
    if ours == in_our_form and (theirs is None or lost):
        group = "transformers refuses it" if theirs is None else "transformers loses a part of it"
        if lost == LISTS:
            group = "transformers prints a list as Python writes it"
        return Comparison(Verdict.EXEMPT, group, their_reason or f"transformers loses {lost}", ours)
    return Comparison(Verdict.DIFFERENT, "another text", their_reason, ours, theirs or "")


def _attempt(render: Any, *args: Any) -> tuple[str | None, str]:
    try:
        return render(*args), ""
    except Refused as e:
        return None, str(e)


def render_by_pdserve(source: str, body: Mapping[str, Any]) -> str:
    """Render as the server does; raises ``Refused`` with the text of the 400."""
    parsed = ChatBody.model_validate(body)
    try:
        make_reader(tool_use_of(parsed), choose_formats(AUTO, AUTO, source), separates_reasoning=True)
        return ChatTemplate(source, SPECIAL_TOKENS).render(chat_of(parsed))
    except (ApiError, PromptError) as e:
        raise Refused(str(e)) from e


def render_by_transformers(source: str, messages: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> str:
    """Render ``messages`` with the other fields of ``body``, as ``apply_chat_template`` does; raises ``Refused``."""
    continues = body.get("continue_final_message", False)
    try:
        [text], _ = render_jinja_template(
            # As apply_chat_template does it.
            [[{key: value for key, value in message.items() if value is not None} for message in messages]],
            tools=body.get("tools"),
            chat_template=source,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **SPECIAL_TOKENS,
            **body.get("chat_template_kwargs", {}),
        )
    except Exception as e:  # whatever a template raises
        raise Refused(f"{type(e).__name__}: {e}") from e
    return str(text)


def _turns(source: str, chat: Conversation) -> list[dict[str, Any]]:
    """Return the messages in the forms that pdserve chose."""
    return ChatTemplate(source, SPECIAL_TOKENS)._probe.find_plan(chat).make_turns(chat)


def find_lost(text: str, body: Mapping[str, Any]) -> list[str]:
    """Return the parts of a body that do not appear in ``text``. Reasoning may be left out."""
    lost = [word for word in _words(body["messages"]) if word not in text]
    if body.get("tools") and "pewter" not in text:
        lost.append("tools")
    if any(dump in text for dump in ("'type': 'text'", '"type": "text"')):
        lost.append(LISTS)
    return lost


def _words(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the last words of each text, and the arguments of calls."""
    words = []
    for message in messages:
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        for text in texts:
            letters = [word for word in text.replace('"', " ").split() if word.isalpha() and word.isascii()]
            words.extend(letters[-2:])
        for call in message.get("tool_calls", ()):
            words.extend(str(value).strip("[]") for value in call["function"]["arguments"].values())
    return words
