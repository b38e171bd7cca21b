"""Collects the entries of one forward pass and packs them into a ``ForwardStep``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..messages.base import I32, pack_i32
from ..messages.worker import ForwardStep, InputLogprobSpec, RowInit, SlotDelta, StepResult
from .estimates.cost_model import StepShape
from .itl_budget import Promise
from .kv_memory import KVMemory
from .readouts import PlannedReadouts
from .req import Req, hold_of


class StepEstimate(NamedTuple):
    """Estimates of a step when it was planned. ``promise`` is None if no decoding request waits for its prompts.

    ``copy_ms``: copies between the tiers, which the worker makes before the step.
    """

    shape: StepShape
    estimate_ms: float
    promise: Promise | None
    copy_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Record of a step that was sent: its requests by entry, and the entries that sampled.

    ``recomputed``: prompt tokens that were computed before (after a retraction or ``Req.start_over``).
    """

    step_id: int
    entries: list[Req]
    sampled: list[int]
    input_logprobs: list[Req]
    readouts: list[Req]
    sent_at: float
    step_estimate: StepEstimate
    recomputed: int = 0

    def keep_of_prompts(self, result: StepResult) -> None:
        """Store what the step's result says of prompts in their requests: log-probabilities and readouts."""
        for req, scores in zip(self.input_logprobs, result.input_logprobs, strict=True):
            if req.input_logprobs is not None:
                req.input_logprobs += scores
        for req, vector in zip(self.readouts, result.readouts, strict=True):
            req.readout = vector


class RowUpdates:
    """What the worker must know of rows before the next step: new requests in them, and slots that changed."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._new: list[RowInit] = []
        self._slots: list[SlotDelta] = []

    def add(self, req: Req, mapped: int) -> None:
        """Record, for the worker, a request that has got its row, and the slots of its first ``mapped`` tokens.

        Those are tokens with KV that no step computes.
        """
        row = hold_of(req).row
        self._new.append(row_init(req, row))
        if mapped:
            self._slots.append(SlotDelta(row, 0, pack_i32(self._memory.pool.slots(req, 0, mapped))))

    def share(self, req: Req) -> None:
        """Cache what is computed of a request for others. If its slots change by that, record the new ones for the
        worker.
        """
        rewrite = self._memory.share(req, req.computed)
        if rewrite is not None:
            self._slots.append(SlotDelta(hold_of(req).row, rewrite.start, pack_i32(rewrite.slots)))

    def take(self) -> tuple[list[RowInit], list[SlotDelta]]:
        """Remove and return what was recorded since the last call: new rows, and changed slots."""
        taken = self._new, self._slots
        self._new, self._slots = [], []
        return taken


class StepBuilder:
    """A step that is being planned. Adding an entry advances its request (``computed``, ``pending``)."""

    def __init__(self) -> None:
        self.shape = StepShape()
        self.entries: list[Req] = []
        self._rows: list[int] = []
        self._starts: list[int] = []
        self._q_lens: list[int] = []
        self._use_last: list[int] = []
        self._sampled: list[int] = []
        self._input_ids: list[I32] = []
        self._slots: list[I32] = []
        self._input_logprobs: list[InputLogprobSpec] = []
        self._scored: list[Req] = []
        self._readouts = PlannedReadouts()
        self._recomputed = 0

    def __len__(self) -> int:
        return len(self.entries)

    def add_decodes(self, reqs: list[Req], slots: I32) -> None:
        """Add one token of each request to the step, written to ``slots`` (one for each). Must precede all prompt
        pieces.
        """
        ids = np.zeros(len(reqs), dtype=np.int32)
        kv_tokens = 0
        for i, req in enumerate(reqs):
            assert req.hold is not None  # ``hold_of`` costs more, and this runs for every token
            kv_tokens += req.computed
            self._rows.append(req.hold.row)
            self._starts.append(req.computed)
            self._use_last.append(1 if req.pending else 0)
            if not req.pending:
                ids[i] = req.token_ids[req.computed]
            req.computed += 1
            req.pending += 1
        self._sampled += range(len(self.entries), len(self.entries) + len(reqs))
        self.entries += reqs
        self._q_lens += [1] * len(reqs)
        self._input_ids.append(ids)
        self._slots.append(slots)
        self.shape = StepShape(len(reqs), kv_tokens)

    def add_chunk(self, req: Req, length: int, slots: I32) -> None:
        """Add the request's next ``length`` known tokens to the step, written to ``slots``.

        If they are the last known ones, the step samples the next token.
        """
        start, end = req.computed, req.computed + length
        self._score_prompt(req, start, end)
        self._readouts.add(req, len(self.entries), end)
        self._rows.append(hold_of(req).row)
        self._starts.append(start)
        self._q_lens.append(length)
        self._use_last.append(0)
        self._input_ids.append(req.token_ids[start:end])
        self._slots.append(slots)
        self.shape = self.shape.with_piece(start, length)
        if req.output_len or req.started_over:
            self._recomputed += length
        if end == req.known_len:
            self._sampled.append(len(self.entries))
            req.pending += 1
        self.entries.append(req)
        req.computed = end

    def _score_prompt(self, req: Req, start: int, end: int) -> None:
        """Ask for the logprobs of prompt tokens that the chunk of positions ``[start, end)`` can score.

        Those that an earlier pass was asked for are left out.
        """
        position, beyond, logprobs = max(req.to_score, start + 1), min(end + 1, req.prompt_len), req.msg.logprobs
        if logprobs is not None and position < beyond:
            targets = pack_i32(req.token_ids[position:beyond])
            spec = InputLogprobSpec(len(self.entries), position - 1 - start, targets, logprobs.top_num)
            self._input_logprobs.append(spec)
            self._scored.append(req)
            req.scored = beyond

    def build(
        self,
        step_id: int,
        now: float,
        rows: tuple[list[RowInit], list[SlotDelta]],
        step_estimate: StepEstimate,
    ) -> tuple[ForwardStep, InFlightStep]:
        """Return the message for the worker, and the record to keep until the step's result comes.

        ``rows``: what ``RowUpdates.take`` returned. ``now``: the time that counts as the step's sending.
        """
        sample = np.zeros(len(self.entries), dtype=np.int32)
        sample[self._sampled] = 1
        step = ForwardStep(
            step_id=step_id,
            rows=pack_i32(self._rows),
            starts=pack_i32(self._starts),
            q_lens=pack_i32(self._q_lens),
            use_last=pack_i32(self._use_last),
            sample=sample.tobytes(),
            input_ids=np.concatenate(self._input_ids).tobytes(),
            out_cache_loc=np.concatenate(self._slots).tobytes(),
            new_rows=rows[0],
            slot_deltas=rows[1],
            input_logprobs=self._input_logprobs,
            readouts=self._readouts.specs,
        )
        scored, readouts = self._scored, self._readouts.complete
        in_flight = InFlightStep(
            step_id, self.entries, self._sampled, scored, readouts, now, step_estimate, self._recomputed
        )
        return step, in_flight


def row_init(req: Req, row: int) -> RowInit:
    """Return what the worker must know of a request that takes ``row``: how to sample, and its tokens where that needs
    them.
    """
    sampling = req.msg.sampling
    known = req.known_tokens(req.known_len)
    return RowInit(
        row=row,
        prompt_len=req.prompt_len,
        sampling=sampling,
        stop_ids=req.msg.stop_ids,
        logprobs=req.msg.logprobs.top_num if req.msg.logprobs is not None else None,
        history=known.tobytes() if sampling.has_penalties else None,
        output=known[req.prompt_len :].tobytes() if sampling.grammar is not None else b"",
        rid=req.rid,
    )
