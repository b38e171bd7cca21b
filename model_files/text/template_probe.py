"""Finds out what a chat template prints of a conversation, so that no text of it is lost silently.

The skeleton of the conversation is rendered. Each of its numbers that does not appear stands for a text that the
template leaves out. That tells as well whether the template reads content as strings or as lists of parts.
Conversations with the same skeleton share the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...messages.conversation import Conversation
from .errors import PromptError
from .rewrites import REWRITES, Rewrite, as_sent
from .skeleton import Numbers, Skeleton, Stand, texts_of
from .turns import ContentForm, as_given, make_turn

RenderTurns = Callable[[Conversation, list[dict[str, Any]]], str]
"""Renders a conversation from these messages; raises ``PromptError``."""
MAX_ANSWERS = 256
"""Maximum number of answers that are kept."""
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Plan:
    """How a template gets a conversation. ``forms``: of each message's content, after ``rewrite``.

    ``is_probed``: a skeleton was printed in full. Otherwise the template refuses it, and its reasons are unknown.
    """

    rewrite: Rewrite
    forms: Sequence[ContentForm]
    is_probed: bool = True

    def make_turns(self, chat: Conversation) -> list[dict[str, Any]]:
        """Return the messages of ``chat`` as the template gets them.

        They are changed by ``rewrite``, and each content is in its form of ``forms``: as sent, a text, or a list of
        parts.
        """
        messages = self.rewrite(chat).messages
        return [make_turn(message, form) for message, form in zip(messages, self.forms, strict=True)]


class TemplateProbe:
    """Probes one template."""

    def __init__(self, render: RenderTurns) -> None:
        self._render = render
        self._numbers = Numbers()
        self._answers: dict[bytes, Plan | Stand] = {}

    def find_plan(self, chat: Conversation) -> Plan:
        """Return a rewrite and forms of contents by which the template prints all texts of ``chat``.

        To find them, the template is run on numbers in place of the texts. The answer is kept for conversations of
        equal structure, also if there is none. Then ``PromptError`` is raised, which names a text that is not printed.
        """
        skeleton = Skeleton(chat, self._numbers)
        key = hashlib.blake2b(_encoder.encode(skeleton.chat), digest_size=16).digest()
        answer = self._answers.pop(key, None) or self._probe(skeleton)
        self._answers[key] = answer
        if len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        if isinstance(answer, Stand):
            raise PromptError(
                answer.field,
                f"the model's chat template does not print {answer.what}; "
                "leave it out, or start the server with another --chat-template",
            )
        return answer

    def _probe(self, skeleton: Skeleton) -> Plan | Stand:
        """Return the first rewrite, with forms of contents, by which the template prints all numbers of ``skeleton``.

        ``skeleton``: the conversation with numbers in place of its texts. If none prints all, return the first number
        that is lost by the one that loses fewest. If the template refuses all of them, return the messages as they were
        sent.
        """
        least: list[Stand] = []
        tried: list[Conversation] = []
        for rewrite in REWRITES:
            chat = rewrite(skeleton.chat)
            if chat in tried:
                continue
            tried.append(chat)
            for forms, lost in self._renderings(chat, skeleton.stands):
                if not lost:
                    return Plan(rewrite, forms)
                if not least or len(lost) < len(least):
                    least = lost
        # A template that refuses the skeleton in every form tells why when the conversation itself is rendered.
        as_it_is = Plan(as_sent, [ContentForm.GIVEN] * len(skeleton.chat.messages), is_probed=False)
        return least[0] if least else as_it_is

    def _renderings(
        self, chat: Conversation, stands: Sequence[Stand]
    ) -> Iterator[tuple[Sequence[ContentForm], list[Stand]]]:
        """Yield forms of the messages' contents, each with the numbers that a rendering in them loses.

        ``stands``: the numbers in place of the texts of ``chat``. Each form is tried for all messages, then another one
        for the messages that lost a text. Forms that the template refuses are left out.
        """
        tried: list[Sequence[ContentForm]] = []
        for form in ContentForm:
            numbers: set[str] = set()
            for other in (form, *ContentForm):
                forms = [
                    as_given(message, other if numbers.intersection((self._note(i), *texts_of(message))) else form)
                    for i, message in enumerate(chat.messages)
                ]
                if forms in tried:
                    continue
                tried.append(forms)
                if (lost := self._find_lost(chat, forms, stands)) is not None:
                    yield forms, lost
                    numbers = numbers or {stand.number for stand in lost}

    def _find_lost(
        self, chat: Conversation, forms: Sequence[ContentForm], stands: Sequence[Stand]
    ) -> list[Stand] | None:
        """Return which of ``stands`` a rendering in these forms loses; None if the template refuses it.

        ``stands``: the numbers in place of the texts of ``chat``. Each part of a content has an additional key. A
        template that prints it prints a list as Python or JSON writes it, which counts as lost content.
        """
        turns = Plan(as_sent, forms).make_turns(chat)
        for i, turn in enumerate(turns):
            content = turn.get("content")
            for part in content if isinstance(content, list) else ():
                part["note"] = self._note(i)
        try:
            found = self._numbers.find_all(self._render(chat, turns))
        except PromptError:
            return None
        dumped = [
            Stand(self._note(i), f"the content of messages[{i}]") for i in range(len(turns)) if self._note(i) in found
        ]
        return [stand for stand in stands if stand.number not in found] + dumped

    def _note(self, message: int) -> str:
        return self._numbers.make(-1 - message)
