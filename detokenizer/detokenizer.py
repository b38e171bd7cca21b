"""From tokens to text, for all requests of an instance.

A request's life here::

    init ──▶ decoding ──▶ finished: the scheduler's finish, a stop string, or an error; its state is gone

The first tokens bring ``init`` and create the state; they replace it if a rid is used again. After a stop string the
scheduler still sends tokens that were under way, and perhaps a finish of its own. Such late items have neither ``init``
nor state, and are dropped. So finished requests leave nothing behind.

One item without ``init`` and state counts: the end of a request that never gave a token. Its meta says so.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from ..messages.base import unpack_i32
from ..messages.outputs import (
    DetokenizeInit,
    FinishReason,
    FinishType,
    NamedLogprob,
    ReqText,
    ReqTokens,
    TextBatch,
    TokenBatch,
)
from ..messages.requests import StopReq
from .named_logprobs import LogprobNames
from .request_decoder import DecoderFactory, RequestDecoder
from .stop_strings import Released, StopMatcher

log = logging.getLogger(__name__)


class StepText(NamedTuple):
    """A step's text for HTTP, and what the scheduler need no longer compute."""

    batch: TextBatch
    stops: list[StopReq]


class _ReqState:
    """One request that is being decoded.

    ``seconds``: time spent on it so far. ``unstoppable``: how many of its next tokens can't complete a stop string.
    """

    __slots__ = ("decoder", "seconds", "stop", "unstoppable")

    def __init__(self, decoder: RequestDecoder, stop: StopMatcher | None, min_tokens: int) -> None:
        self.decoder = decoder
        self.stop = stop
        self.unstoppable = min_tokens
        self.seconds = 0.0

    def feed(self, text: str) -> Released:
        """Pass the next token's text through the search for stop strings."""
        if self.stop is None:
            return Released(text)
        if self.unstoppable:
            self.unstoppable -= 1
            return self.stop.feed(text, may_match=False)
        return self.stop.feed(text)


class _Piece(NamedTuple):
    """Text of an item's first ``tokens`` tokens; ``matched`` is the stop string that the last of them completed.

    ``chars``: how many characters each token completed, one entry a token, where logprobs ask for it.
    """

    text: str
    tokens: int
    matched: str | None = None
    chars: list[int] | None = None


class Detokenizer:
    """Holds the state of every request that is being decoded."""

    def __init__(self, factory: DecoderFactory) -> None:
        self._factory = factory
        self._names = LogprobNames(factory)
        self._states: dict[str, _ReqState] = {}

    def __len__(self) -> int:
        """Return the number of requests that are being decoded."""
        return len(self._states)

    def process(self, batch: TokenBatch) -> StepText:
        """Decode a step's tokens."""
        texts: list[ReqText] = []
        stops: list[StopReq] = []
        started = time.perf_counter()
        for item in batch.items:
            state = self._find_state(item)
            if state is None:
                if _ends_unstarted(item):
                    texts.append(ReqText(item.rid, "", [], item.finish, item.meta))
                continue
            if state.stop is None and item.finish is None and item.logprobs is None and item.prompt is None:
                text = state.decoder.decode(item.token_ids)
                texts.append(ReqText(item.rid, text, item.token_ids, meta=item.meta))
            else:
                piece = _read_piece(state, item)
                if piece.matched is not None and item.finish is None:
                    stops.append(StopReq(rid=item.rid))
                texts.append(self._release(state, item, piece, started))
            now = time.perf_counter()
            state.seconds += now - started
            started = now
        return StepText(TextBatch(items=texts), stops)

    def forget(self, rid: str) -> None:
        """Drop a request's state, if there is any, because it ended in an error. Text held back is not shown."""
        self._states.pop(rid, None)

    def _find_state(self, item: ReqTokens) -> _ReqState | None:
        if item.init is None:
            return self._states.get(item.rid)
        state = self._states[item.rid] = self._start(item.init)
        log.debug("output begins", extra={"rid": item.rid})
        return state

    def _start(self, init: DetokenizeInit) -> _ReqState:
        decoder = self._factory.start(unpack_i32(init.prompt_tail), skip_special_tokens=init.skip_special_tokens)
        stop = [s for s in init.stop if s]
        return _ReqState(decoder, StopMatcher(stop) if stop else None, init.min_tokens)

    def _release(self, state: _ReqState, item: ReqTokens, piece: _Piece, started: float) -> ReqText:
        """Make the answer to an item: its text up to the stop string, if one was found, or up to its end."""
        finish, text = item.finish, piece.text
        if piece.matched is not None:
            finish = FinishReason(FinishType.STOP, piece.matched)
        elif finish is not None and state.stop is not None:
            text += state.stop.flush()
        logprobs = self._logprobs(item, piece)
        prompt = None if item.prompt is None else self._names.prompt(item.prompt)
        token_ids = item.token_ids[: piece.tokens]
        if finish is None:
            # A first item's meta tells a stream its counts; later ones are only there in case a stop string ends it.
            meta = item.meta if item.init is not None else None
            return ReqText(item.rid, text, token_ids, meta=meta, logprobs=logprobs, prompt=prompt)
        self.forget(item.rid)
        log.debug("output ends: %s", finish.type, extra={"rid": item.rid})
        meta = item.meta
        if meta is not None:
            meta.completion_tokens -= len(item.token_ids) - piece.tokens
            meta.timing.detokenize_ms = (state.seconds + time.perf_counter() - started) * 1000
        return ReqText(item.rid, text, token_ids, finish, meta, logprobs, prompt)

    def _logprobs(self, item: ReqTokens, piece: _Piece) -> list[NamedLogprob] | None:
        if item.logprobs is None or piece.chars is None:
            return None
        return self._names.named(item.logprobs[: piece.tokens], piece.chars)


def _read_piece(state: _ReqState, item: ReqTokens) -> _Piece:
    """Decode the item's tokens, up to the one that completes a stop string."""
    shown = len(item.token_ids)
    if item.finish is not None and item.finish.type is FinishType.STOP and isinstance(item.finish.matched, int):
        shown = max(0, shown - 1)  # a stop token is counted, but its text is not shown
    if state.stop is None and item.logprobs is None:
        return _Piece(state.decoder.decode(item.token_ids[:shown]), len(item.token_ids))
    texts = []
    chars = [0] * len(item.token_ids)
    for i in range(shown):
        text = state.decoder.decode(item.token_ids[i : i + 1])
        chars[i] = len(text)
        released = state.feed(text)
        texts.append(released.text)
        if released.matched is not None:
            return _Piece("".join(texts), i + 1, released.matched, chars)
    return _Piece("".join(texts), len(item.token_ids), None, chars)


def _ends_unstarted(item: ReqTokens) -> bool:
    """Return whether an item without state ends a request that never gave a token.

    Otherwise it is a late item of a stopped request.
    """
    never_gave = item.meta is None or item.meta.completion_tokens == 0
    return item.finish is not None and not item.token_ids and never_gave
