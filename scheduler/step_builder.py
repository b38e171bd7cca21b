"""Collects the entries of one forward pass and packs them into a ``ForwardStep``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..messages.base import I32, pack_i32
from ..messages.worker import ForwardStep, InputLogprobSpec, RowInit, SlotDelta
from .estimates.cost_model import StepShape
from .itl_budget import Promise
from .req import Req


class Foresight(NamedTuple):
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
    sent_at: float
    foresight: Foresight
    recomputed: int = 0


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
        self._recomputed = 0

    def __len__(self) -> int:
        return len(self.entries)

    def add_decodes(self, reqs: list[Req], slots: I32) -> None:
        """Add one token of each request, written to ``slots`` (aligned). Must come before any piece."""
        ids = np.zeros(len(reqs), dtype=np.int32)
        kv_tokens = 0
        for i, req in enumerate(reqs):
            assert req.hold is not None
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
        """Add the request's next ``length`` tokens, all known. It samples if they are the last ones."""
        assert req.hold is not None
        start, end = req.computed, req.computed + length
        self._score_prompt(req, start, end)
        self._rows.append(req.hold.row)
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
        """Ask for the logprobs of prompt tokens that this chunk's logits score, unless an earlier pass brought them."""
        position, beyond = max(req.to_score, start + 1), min(end + 1, req.prompt_len)
        if position < beyond:
            assert req.msg.logprobs is not None
            targets = pack_i32(req.token_ids[position:beyond])
            spec = InputLogprobSpec(len(self.entries), position - 1 - start, targets, req.msg.logprobs.top_num)
            self._input_logprobs.append(spec)
            self._scored.append(req)
            req.scored = beyond

    def build(
        self,
        step_id: int,
        now: float,
        new_rows: list[RowInit],
        slot_deltas: list[SlotDelta],
        foresight: Foresight,
    ) -> tuple[ForwardStep, InFlightStep]:
        """Return the message for the worker, and the record to keep until its result comes."""
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
            new_rows=new_rows,
            slot_deltas=slot_deltas,
            input_logprobs=self._input_logprobs,
        )
        in_flight = InFlightStep(step_id, self.entries, self._sampled, self._scored, now, foresight, self._recomputed)
        return step, in_flight
