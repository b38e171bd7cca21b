"""The logprobs of ``/generate``, as JSON: ``[logprob, token id, null]`` for each token.

A stream repeats all of them in every event, so each entry is rendered once and its bytes are kept: an event costs a
copy, not a walk through a prompt of thousands of tokens. The null is SGLang's place for the token's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from ...messages.outputs import TokenLogprob
from .submission import Choice


class EncodedList:
    """A JSON list of entries that only ever grows at its end."""

    def __init__(self, render: Callable[[TokenLogprob], Any]) -> None:
        self._render = render
        self._count = 0
        self._json = bytearray()

    def upto(self, entries: Sequence[TokenLogprob]) -> orjson.Fragment:
        """All of ``entries``, which begin with those of the last call."""
        if new := [self._render(entry) for entry in entries[self._count :]]:
            self._json += (b"," if self._count else b"") + orjson.dumps(new)[1:-1]
            self._count = len(entries)
        return orjson.Fragment(b"".join((b"[", self._json, b"]")))


class LogprobLists:
    """What one choice's ``meta_info`` says of logprobs; ``top``: with the alternatives to each token."""

    def __init__(self, top: bool) -> None:
        self._renders = {"token": _pair, "top": _top} if top else {"token": _pair}
        self._prompt: list[TokenLogprob] | None = None
        self._inputs = self._empty()
        self._outputs = self._empty()

    def upto_now(self, choice: Choice) -> dict[str, orjson.Fragment]:
        """The lists so far."""
        prompt = choice.meta.input_logprobs if choice.meta is not None else None
        if prompt is not self._prompt:
            # They come in one piece, but a later word of the engine replaces them.
            self._prompt, self._inputs = prompt, self._empty()
        lists = {f"input_{kind}_logprobs": encoded.upto(prompt or []) for kind, encoded in self._inputs.items()}
        return lists | {f"output_{kind}_logprobs": e.upto(choice.logprobs) for kind, e in self._outputs.items()}

    def _empty(self) -> dict[str, EncodedList]:
        return {kind: EncodedList(render) for kind, render in self._renders.items()}


def _pair(entry: TokenLogprob) -> Any:
    return entry.logprob, entry.token_id, None


def _top(entry: TokenLogprob) -> Any:
    # The prompt's first token follows nothing: it has no alternatives.
    return [(logprob, token_id, None) for token_id, logprob in entry.top] if entry.logprob is not None else None
