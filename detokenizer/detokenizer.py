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

from ..messages.base import I32, unpack_i32
from ..messages.outputs import (
    DetokenizeInit,
    FinishReason,
    FinishType,
    ReqText,
    ReqTokens,
    TextBatch,
    TokenBatch,
)
from ..messages.requests import StopReq
from ..messages.sampling import OutputMarks
from .named_logprobs import LogprobNames
from .output import Output, PlainOutput, ReasonedOutput, StoppableOutput
from .reasoning import ReasoningWatch
from .request_decoder import DecoderFactory

log = logging.getLogger(__name__)
NO_MARKS = OutputMarks()


class StepText(NamedTuple):
    """A step's text for HTTP, and what the scheduler need no longer compute."""

    batch: TextBatch
    stops: list[StopReq]


class Detokenizer:
    """Holds the state of every request that is being decoded."""

    def __init__(self, factory: DecoderFactory) -> None:
        self._factory = factory
        self._names = LogprobNames(factory)
        self._outputs: dict[str, Output] = {}

    def __len__(self) -> int:
        """Return the number of requests that are being decoded."""
        return len(self._outputs)

    def process(self, batch: TokenBatch) -> StepText:
        """Turn a step's tokens into text, and return it with the requests that a stop string has ended.

        Creates the state of requests that begin, and drops that of requests that end. Late items of ended requests are
        ignored.
        """
        texts: list[ReqText] = []
        stops: list[StopReq] = []
        outputs = self._outputs
        started = time.perf_counter()
        for item in batch.items:
            output = outputs.get(item.rid) if item.init is None else self._begin(item.rid, item.init)
            if output is None:
                if _ends_unstarted(item):
                    texts.append(ReqText(item.rid, "", [], item.finish, item.meta))
                continue
            if item.finish is None and item.logprobs is None and item.prompt is None:
                text = output.advance(item)
            else:
                text = self._read(output, item)
            texts.append(text)
            if text.finish is not None:
                self._end(output, item, text, text.finish, started)
                if item.finish is None:
                    stops.append(StopReq(rid=item.rid))
            now = time.perf_counter()
            output.seconds += now - started
            started = now
        return StepText(TextBatch(items=texts), stops)

    def forget(self, rid: str) -> None:
        """Drop a request's state, if there is any. Text that it still held back is never shown."""
        self._outputs.pop(rid, None)

    def _begin(self, rid: str, init: DetokenizeInit) -> Output:
        tail, marks = unpack_i32(init.prompt_tail), init.marks or NO_MARKS
        decoder = self._factory.start(tail, skip_special_tokens=init.skip_special_tokens, shown=marks.shown)
        stop = [s for s in init.stop if s]
        output: Output
        if stop:
            output = StoppableOutput(decoder, stop, init.min_tokens, self._watch(marks, tail))
        elif marks.reasoning[0]:
            output = ReasonedOutput(decoder, self._watch(marks, tail))
        else:
            output = PlainOutput(decoder)
        self._outputs[rid] = output
        log.debug("output begins", extra={"rid": rid})
        return output

    def _watch(self, marks: OutputMarks, tail: I32) -> ReasoningWatch:
        """Make the object that finds the end of the reasoning in one answer, and counts its tokens.

        ``tail``: the prompt's last token ids, which show whether the prompt ends within reasoning.
        """
        decoder = self._factory.start(tail[:0], skip_special_tokens=False)
        prompt = decoder.decode(tail.tolist()) + decoder.flush()
        return ReasoningWatch(*marks.reasoning, prompt)

    def _read(self, output: Output, item: ReqTokens) -> ReqText:
        """Decode an item with a finish, with logprobs or with a report on the prompt.

        If a stop string is complete in it, the result has that as its finish, and none of the tokens after it.
        """
        ids, finish = item.token_ids, item.finish
        # A stop token is counted, but its text is not shown.
        hidden = finish is not None and finish.type is FinishType.STOP and isinstance(finish.matched, int)
        shown = ids[:-1] if hidden else ids
        piece = output.read(shown) if item.logprobs is None else output.read_each(shown)
        text, tokens = piece.text, piece.tokens
        if piece.matched is not None:
            finish = FinishReason(FinishType.STOP, piece.matched)
        else:
            tokens = len(ids)
            if finish is not None:
                rest = output.flush()
                text += rest.text
                finish = finish if rest.matched is None else FinishReason(FinishType.STOP, rest.matched)
        # A first item's meta has a stream's counts. Later ones are only there in case a stop string ends it.
        meta = item.meta if finish is not None or item.init is not None else None
        logprobs = None
        if item.logprobs is not None:
            chars = [*piece.chars, *[0] * (tokens - piece.tokens)]
            logprobs = self._names.named(item.logprobs[:tokens], chars)
        prompt = None if item.prompt is None else self._names.prompt(item.prompt)
        report = output.reasoning if finish is not None else output.new_reasoning()
        return ReqText(item.rid, text, ids[:tokens], finish, meta, logprobs, prompt, report)

    def _end(self, output: Output, item: ReqTokens, text: ReqText, finish: FinishReason, started: float) -> None:
        """Drop the state of a request that ends with ``text``, and complete the meta in ``text``, if it has any.

        Tokens of ``item`` after a stop string are taken off the meta's count of output tokens. ``started``: when the
        decoding of ``item`` began (``perf_counter``); the time since is part of the meta's decoding time.
        """
        self.forget(item.rid)
        log.debug("output ends: %s", finish.type, extra={"rid": item.rid})
        if text.meta is not None:
            text.meta.completion_tokens -= len(item.token_ids) - len(text.token_ids)
            text.meta.timing.detokenize_ms = (output.seconds + time.perf_counter() - started) * 1000


def _ends_unstarted(item: ReqTokens) -> bool:
    """Return whether ``item``, for which there is no state, is the end of a request that never gave a token.

    False for a late item of a request that a stop string has ended. Such an item is dropped.
    """
    never_gave = item.meta is None or item.meta.completion_tokens == 0
    return item.finish is not None and not item.token_ids and never_gave
