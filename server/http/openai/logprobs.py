"""Writers of ``logprobs`` in OpenAI's answers. One is chosen for each request, at its start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from ....messages.outputs import NamedLogprob
from ....messages.requests import LogprobOptions
from ..engine.submission import Choice
from .schemas import ChatBody, CompletionBody


class LogprobsWriter(Protocol):
    """Asks for log-probabilities, and writes them into the answer."""

    @property
    def options(self) -> LogprobOptions | None:
        """Return which log-probabilities to ask the engine for; None: none."""

    def write(self, choice: Choice, entries: list[NamedLogprob], is_first: bool) -> dict[str, Any] | None:
        """Return the ``logprobs`` field of a choice for its new ``entries``; None if the client wants none.

        ``is_first``: nothing of the choice was written before.
        """


class NoLogprobs:
    """Writer for a request without log-probabilities."""

    options: ClassVar[None] = None

    @staticmethod
    def write(choice: Choice, entries: list[NamedLogprob], is_first: bool) -> None:
        """Return None: the choice's ``logprobs`` field is null."""


class TokenNames:
    """What tokens are called in logprobs: by their text, or by their ids, which no two tokens share.

    Bytes that are a part of a character are written as OpenAI does, ``bytes:\\xf0\\x9f``.
    """

    def __init__(self, as_ids: bool) -> None:
        self._as_ids = as_ids

    def name(self, token_id: int, data: bytes) -> str:
        """Return the token's text, or its id (``token_id:42``) if the client asked for ids.

        ``data``: the token's bytes, which are written in hexadecimal if they are not valid UTF-8 by themselves.
        """
        if self._as_ids:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(body: ChatBody) -> LogprobsWriter:
    """Return the writer that a chat's body asks for; without ``logprobs``, one that writes null."""
    if not body.logprobs:
        return NoLogprobs()
    return ChatLogprobsWriter(TokenNames(body.return_tokens_as_token_ids), body.top_logprobs)


class ChatLogprobsWriter:
    """Writes an object for each token, with its alternatives."""

    def __init__(self, names: TokenNames, top_num: int) -> None:
        self._names = names
        self.options = LogprobOptions(start_len=-1, top_num=top_num)

    def write(self, choice: Choice, entries: list[NamedLogprob], is_first: bool) -> dict[str, Any]:
        """Return a chat's ``logprobs`` object: the token, its log-probability and its alternatives for each entry."""
        content = [
            {
                **self._entry(entry.token_id, entry.logprob, entry.data),
                "top_logprobs": [self._entry(*alternative) for alternative in entry.top],
            }
            for entry in entries
        ]
        return {"content": content}

    def _entry(self, token_id: int, logprob: float | None, data: bytes) -> dict[str, Any]:
        return {"token": self._names.name(token_id, data), "logprob": logprob, "bytes": list(data)}


def completion_logprobs(body: CompletionBody, echo: Callable[[Choice], str]) -> LogprobsWriter:
    """Return the writer that a completion's body asks for; without ``logprobs``, one that writes null.

    ``echo`` returns the prompt's text if the answer repeats it, else an empty string.
    """
    if body.logprobs is None:
        return NoLogprobs()
    options = LogprobOptions(start_len=0 if body.echo else -1, top_num=body.logprobs)
    return CompletionLogprobsWriter(TokenNames(body.return_tokens_as_token_ids), options, echo)


class CompletionLogprobsWriter:
    """Writes lists with an entry for each token, its place in the text among them.

    ``echo`` returns the prompt's text, if the choice's text begins with it.
    """

    def __init__(self, names: TokenNames, options: LogprobOptions, echo: Callable[[Choice], str]) -> None:
        self._names = names
        self.options = options
        self._echo = echo
        self._offsets: dict[int, int] = {}
        """Offset of each choice's next token in its text, prompt included."""

    def write(self, choice: Choice, entries: list[NamedLogprob], is_first: bool) -> dict[str, Any]:
        """Return a completion's ``logprobs`` object for new ``entries``; move on the choice's offset in its text.

        If the answer repeats the prompt, a choice's first object begins with the prompt's tokens.
        """
        echo = self._echo(choice)
        prompt = (choice.prompt.logprobs or []) if is_first and choice.prompt is not None else []
        offsets = _offsets(prompt, 0, len(echo))
        start = self._offsets.get(choice.index)
        if start is None:
            # An answer that began at another instance: what was sent from there comes before.
            start = len(echo) + choice.sent_logprob_chars
            if choice.keeps_sent:
                start += sum(entry.chars for entry in choice.logprobs)
            start -= sum(entry.chars for entry in entries)
        # Before the end, text that is held back may be longer than what is shown.
        end = start + sum(entry.chars for entry in entries) if choice.finish is None else len(echo) + choice.chars
        offsets += _offsets(entries, start, end)
        self._offsets[choice.index] = start + sum(entry.chars for entry in entries)
        return _lists([*prompt, *entries], offsets, self._names)


def _offsets(entries: list[NamedLogprob], start: int, end: int) -> list[int]:
    """Return the offset in characters at which each entry's token begins. The first one begins at ``start``.

    No offset is above ``end``, where the text ends: a stop string may have cut it.
    """
    offsets = []
    for entry in entries:
        offsets.append(min(start, end))
        start += entry.chars
    return offsets


def _lists(entries: list[NamedLogprob], offsets: list[int], names: TokenNames) -> dict[str, Any]:
    """Return OpenAI's ``logprobs`` object. ``offsets``: characters of the choice's text before each token."""
    return {
        "tokens": [names.name(e.token_id, e.data) for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": [_alternatives(e, names) for e in entries],
        "text_offset": offsets,
    }


def _alternatives(entry: NamedLogprob, names: TokenNames) -> dict[str, float] | None:
    """Map the name of each alternative, and of the entry's own token, to its logprob.

    Of tokens with the same name, the first one counts, which is the most probable alternative.
    Return None for a prompt's first token, which has no logprob.
    """
    alternatives: dict[str, float] = {}
    for token_id, logprob, data in top_with_own(entry):
        alternatives.setdefault(names.name(token_id, data), logprob)
    return alternatives or None


def top_with_own(entry: NamedLogprob) -> list[tuple[int, float, bytes]]:
    """Return the alternatives of a position, its own token among them; empty for a prompt's first token."""
    if entry.logprob is None:
        return []
    own = (entry.token_id, entry.logprob, entry.data)
    return entry.top if any(token_id == entry.token_id for token_id, _, _ in entry.top) else [*entry.top, own]
