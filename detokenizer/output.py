"""The output of one request: its decoder, and the search for its stop strings if it has any.

A request without stop strings decodes an item's tokens at once. One with stop strings, or an item with logprobs, needs
the text of each token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ..messages.outputs import FinishReason, FinishType, ReasoningReport, ReqText, ReqTokens
from .reasoning import ReasoningWatch
from .request_decoder import RequestDecoder
from .stop_strings import Released, StopMatcher


class DecodedText(NamedTuple):
    """Text of an item's first ``tokens`` tokens. ``matched`` is the stop string that the last of them completed."""

    text: str
    tokens: int
    matched: str | None = None
    chars: Sequence[int] = ()
    """Number of characters that each token completed, if it was asked for."""


class Output(ABC):
    """State of one request that is being decoded. ``seconds`` is the time spent on it so far."""

    __slots__ = ("_decoder", "seconds")

    def __init__(self, decoder: RequestDecoder) -> None:
        self._decoder = decoder
        self.seconds = 0.0

    @property
    def reasoning(self) -> ReasoningReport | None:
        """Return whether the prompt ended within reasoning, and the number of reasoning tokens so far.

        It is None if the answer's format has no reasoning.
        """
        return None

    def new_reasoning(self) -> ReasoningReport | None:
        """Return ``reasoning`` if it has changed since the last call, otherwise None."""
        return None

    @abstractmethod
    def advance(self, item: ReqTokens) -> ReqText:
        """Decode an item that has only tokens. The result has a finish if they complete a stop string."""

    @abstractmethod
    def read(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode tokens, up to the one that completes a stop string. Tokens after it are ignored."""

    @abstractmethod
    def read_each(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode tokens as ``read`` does, and count the characters of text that each one completes."""

    @abstractmethod
    def flush(self) -> Released:
        """Return text that was held back, once no more tokens follow. It may complete a stop string."""


class PlainOutput(Output):
    """Output of a request without stop strings."""

    __slots__ = ()

    def advance(self, item: ReqTokens) -> ReqText:
        """Decode all tokens of the item in one call. The result has no finish: there are no stop strings."""
        return ReqText(item.rid, self._decoder.decode(item.token_ids), item.token_ids, meta=item.meta)

    def read(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode all tokens in one call. ``matched`` is None, as there are no stop strings."""
        return DecodedText(self._decoder.decode(token_ids), len(token_ids))

    def read_each(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode tokens one at a time, to count the characters that each completed. ``matched`` is None."""
        texts = [self._decoder.decode([token_id]) for token_id in token_ids]
        return DecodedText("".join(texts), len(token_ids), chars=[len(text) for text in texts])

    def flush(self) -> Released:
        """Return the text that the decoder held back. ``matched`` is None, as there are no stop strings."""
        return Released(self._decoder.flush())


class ReasonedOutput(PlainOutput):
    """Output of an answer that may begin with reasoning."""

    __slots__ = ("_watch",)

    def __init__(self, decoder: RequestDecoder, watch: ReasoningWatch) -> None:
        super().__init__(decoder)
        self._watch = watch

    @property
    def reasoning(self) -> ReasoningReport | None:
        """Return whether the prompt ended within reasoning, and the number of reasoning tokens so far."""
        return self._watch.report

    def new_reasoning(self) -> ReasoningReport | None:
        """Return ``reasoning`` if it has changed since the last call, otherwise None."""
        return self._watch.new_report()

    def advance(self, item: ReqTokens) -> ReqText:
        """Decode an item. The result has a reasoning report if the item is the first one or changes the report."""
        text = self.read(item.token_ids).text
        return ReqText(item.rid, text, item.token_ids, meta=item.meta, reasoning=self.new_reasoning())

    def read(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode tokens in one call once the reasoning is over, and until then one at a time to find its end."""
        return super().read(token_ids) if self._watch.is_over else self.read_each(token_ids)

    def read_each(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode tokens one at a time, count the characters of each, and look for the end of the reasoning."""
        texts = []
        for token_id in token_ids:
            texts.append(self._decoder.decode([token_id]))
            self._watch.feed(texts[-1])
        return DecodedText("".join(texts), len(token_ids), chars=[len(text) for text in texts])


class StoppableOutput(Output):
    """Output of a request with stop strings. The next ``min_tokens`` tokens can't complete one, nor can reasoning."""

    __slots__ = ("_matcher", "_unstoppable", "_watch")

    def __init__(self, decoder: RequestDecoder, stop: Sequence[str], min_tokens: int, watch: ReasoningWatch) -> None:
        super().__init__(decoder)
        self._matcher = StopMatcher(stop)
        self._unstoppable = min_tokens
        self._watch = watch

    @property
    def reasoning(self) -> ReasoningReport | None:
        """Return the state of the reasoning so far; None for a format without reasoning."""
        return self._watch.report

    def new_reasoning(self) -> ReasoningReport | None:
        """Return ``reasoning`` if it has changed since the last call, otherwise None."""
        return self._watch.new_report()

    def advance(self, item: ReqTokens) -> ReqText:
        """Decode the tokens of an item, up to a stop string.

        If one is found, the result ends before it, has a finish, and leaves out the tokens after the match.
        The result has the item's meta and a reasoning report if there is a match, or if it is the
        request's first item. It also has a report if the item changes the report.
        """
        piece = self.read_each(item.token_ids)
        if piece.matched is not None:
            finish = FinishReason(FinishType.STOP, piece.matched)
            shown = item.token_ids[: piece.tokens]
            return ReqText(item.rid, piece.text, shown, finish, item.meta, reasoning=self.reasoning)
        meta = item.meta if item.init is not None else None
        return ReqText(item.rid, piece.text, item.token_ids, meta=meta, reasoning=self.new_reasoning())

    def read(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode tokens one at a time, as ``read_each`` does: each of them may complete a stop string."""
        return self.read_each(token_ids)

    def read_each(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode tokens one at a time, up to the one that completes a stop string, and count the characters of each.

        The counts include text that is held back because it may begin a stop string.
        """
        texts, chars = [], []
        for token_id in token_ids:
            text = self._decoder.decode([token_id])
            chars.append(len(text))
            released = self._matcher.feed(text, may_match=self._may_match)
            self._watch.feed(text)
            self._unstoppable -= self._unstoppable > 0
            texts.append(released.text)
            if released.matched is not None:
                return DecodedText("".join(texts), len(chars), released.matched, chars)
        return DecodedText("".join(texts), len(chars), None, chars)

    def flush(self) -> Released:
        """Return the text held back by the decoder and by the search for stop strings.

        The decoder's text may still complete a stop string, which ends the text before it.
        """
        released = self._matcher.feed(self._decoder.flush(), may_match=self._may_match)
        if released.matched is not None:
            return released
        return Released(released.text + self._matcher.flush())

    @property
    def _may_match(self) -> bool:
        """Return whether the next token may complete a stop string."""
        return not self._unstoppable and self._watch.is_over
