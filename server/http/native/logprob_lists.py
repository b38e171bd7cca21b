"""The logprobs of ``/generate``, as JSON: ``[logprob, token id, text or null]`` for each token.

A stream repeats all of them in every event, so each entry is rendered once and its bytes are kept. An event costs a
copy instead of a walk through a prompt of thousands of tokens. Texts are included if the client asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from ....messages.outputs import NamedLogprob, PromptText


class EncodedList:
    """A JSON list of entries that only ever grows at its end."""

    def __init__(self, render: Callable[[NamedLogprob], Any]) -> None:
        self._render = render
        self._count = 0
        self._json = bytearray()

    def upto(self, entries: Sequence[NamedLogprob]) -> orjson.Fragment:
        """Return ``entries``, all of an answer's so far, as a JSON list.

        Those of the last call must come first, unchanged: they are not encoded again.
        """
        if new := [self._render(entry) for entry in entries[self._count :]]:
            self._json += (b"," if self._count else b"") + orjson.dumps(new)[1:-1]
            self._count = len(entries)
        return orjson.Fragment(b"".join((b"[", self._json, b"]")))


class LogprobLists:
    """The logprobs in one choice's ``meta_info``.

    ``top``: include the alternatives to each token. ``texts``: include the tokens' text.
    """

    def __init__(self, top: bool, texts: bool = False) -> None:
        def pair(entry: NamedLogprob) -> Any:
            return entry.logprob, entry.token_id, _text(entry.data) if texts else None

        def alternatives(entry: NamedLogprob) -> Any:
            # The prompt's first token has no context, so it has no alternatives.
            if entry.logprob is None:
                return None
            return [(logprob, token_id, _text(data) if texts else None) for token_id, logprob, data in entry.top]

        self._renders = {"token": pair, "top": alternatives} if top else {"token": pair}
        self._inputs = self._empty()
        self._outputs = self._empty()

    def upto(self, prompt: PromptText | None, logprobs: Sequence[NamedLogprob]) -> dict[str, orjson.Fragment]:
        """Return the fields ``input_…_logprobs`` (of the prompt) and ``output_…_logprobs``, as encoded JSON.

        ``prompt`` and ``logprobs`` begin with those of the last call. None: no log-probabilities of the prompt.
        """
        scored = (prompt.logprobs if prompt is not None else None) or []
        lists = {f"input_{kind}_logprobs": encoded.upto(scored) for kind, encoded in self._inputs.items()}
        return lists | {f"output_{kind}_logprobs": e.upto(logprobs) for kind, e in self._outputs.items()}

    def _empty(self) -> dict[str, EncodedList]:
        return {kind: EncodedList(render) for kind, render in self._renders.items()}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
