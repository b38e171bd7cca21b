"""Runs one ``ForwardStep`` after another: the device's request table, the pass, the samples, the ``StepResult``.

A step is applied in the order that ``ForwardStep`` fixes: rows that begin, slots that moved, the table positions of
this pass, the pass; then the sampled tokens enter the rows' state, where the next step's ``use_last`` finds them. The
scheduler may therefore send a step before it has the result of the one before.

On the CPU kernels the common step, which wants tokens and nothing else, is one call of theirs. What else there is goes
the general way: each part a call of its own, on any device.

Shapes: T tokens, B entries, S sampled entries, L wanted rows of logits, R rows and C columns of the request table.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..messages.base import I32, pack_i32, unpack_i32
from ..messages.outputs import TokenLogprob
from ..messages.worker import ForwardStep, InputLogprobSpec, StepResult
from ..runtime.layers_done import LayersDone
from .forward_batch import ForwardBatch
from .logprobs import score
from .rows import NO_LOGPROBS, RowParams, RowStates
from .sampler import sample
from .step_check import StepLimits, check_changes, check_entries

if TYPE_CHECKING:
    from .kernels.cpu_engine import CpuEngine
    from .kernels.native_steps import NativeSteps
    from .kernels.sampling import NativeSampler

I64 = npt.NDArray[np.int64]
log = logging.getLogger(__name__)


class Model(Protocol):
    """What a step needs of ``ModelRunner``."""

    vocab_size: int
    context_length: int
    num_slots: int
    device: torch.device
    engine: CpuEngine | None
    sampler: NativeSampler | None
    clears_begun_pages: bool

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits, [L, V] float32."""
        ...


class _Plan(NamedTuple):
    """A step, unpacked. Sampled entries' logits come first, then those of each ``InputLogprobSpec``."""

    batch: ForwardBatch
    sampled: I64
    """[S]: entries that sample."""
    rows: I64
    """[S]: their rows."""
    positions: I64
    """[S]: positions of the tokens to be sampled."""


class StepRunner:
    """Owns the device's request table and the rows' state. One thread."""

    def __init__(self, model: Model, max_reqs: int) -> None:
        self._model = model
        self._device = model.device
        self._rows = rows = RowStates(max_reqs, model.vocab_size, model.device)
        self._req_to_token = torch.zeros((max_reqs, model.context_length), dtype=torch.int32, device=model.device)
        self._limits = StepLimits(max_reqs, model.context_length, model.num_slots)
        self._native: NativeSteps | None = None
        if model.engine is not None:
            # Imported here: it loads the compiled kernels.
            from .kernels.native_steps import NativeSteps

            tables = (self._req_to_token, rows.last_tokens, rows.table)
            self._native = NativeSteps(model.engine, *tables, clear_begun=model.clears_begun_pages)

    @torch.inference_mode()
    def run(self, step: ForwardStep, done: LayersDone | None = None) -> StepResult:
        """Apply the step and compute it, counting layers that are ``done``. ``forward_ms`` of the result is the time of
        this whole call.

        Raises ``ValueError`` or ``IndexError`` where the step contradicts itself or the table: the scheduler's books
        are wrong then.
        """
        begin = time.perf_counter()
        if step.new_rows or step.slot_deltas:
            check_changes(step, self._limits)
            self._apply(step)
        if self._native is not None and (chosen := self._native.run(step, done)) is not None:
            bad_entries = [] if chosen.finite.all() else _sampled_entries(step)[~chosen.finite].tolist()
            forward_ms = (time.perf_counter() - begin) * 1e3
            return StepResult(step.step_id, chosen.tokens, forward_ms, bad_entries=bad_entries)
        return self._run_generally(step, begin, done)

    def _run_generally(self, step: ForwardStep, begin: float, done: LayersDone | None) -> StepResult:
        check_entries(step, self._limits)
        plan = self._plan(step)
        plan.batch.done = done
        logits_LV = self._model.forward(plan.batch)
        if self._device.type == "cuda":
            # Pages of this step may be pushed to a peer as soon as we return.
            torch.cuda.synchronize(self._device)
        count = len(plan.sampled)
        bad: set[int] = set()
        tokens, logprobs = self._sample(logits_LV[:count], plan, bad)
        input_logprobs = _input_logprobs(logits_LV[count:], step.input_logprobs, bad)
        return StepResult(
            step_id=step.step_id,
            next_tokens=pack_i32(tokens),
            forward_ms=(time.perf_counter() - begin) * 1e3,
            logprobs=logprobs,
            input_logprobs=input_logprobs,
            bad_entries=sorted(bad),
        )

    def _apply(self, step: ForwardStep) -> None:
        for init in step.new_rows:
            self._rows.start(init)
            log.debug("takes row %d", init.row, extra={"rid": init.rid})
        for delta in step.slot_deltas:
            # A copy, because torch wants writable memory.
            slots = torch.from_numpy(unpack_i32(delta.slots).copy())
            self._req_to_token[delta.row, delta.start : delta.start + len(slots)] = slots.to(self._device)

    def _plan(self, step: ForwardStep) -> _Plan:
        rows, starts, q_lens = _i64(step.rows), _i64(step.starts), _i64(step.q_lens)
        ends = np.cumsum(q_lens)
        first_tokens = ends - q_lens
        num_tokens = int(q_lens.sum())
        positions = np.arange(num_tokens) + np.repeat(starts - first_tokens, q_lens)
        input_ids = self._to_device(_i64(step.input_ids))
        out_cache_loc = self._to_device(_i64(step.out_cache_loc))
        rows_B = self._to_device(rows)
        positions_T = self._to_device(positions)
        use_last = np.flatnonzero(unpack_i32(step.use_last))
        if len(use_last):
            input_ids[self._to_device(first_tokens[use_last])] = self._rows.last_tokens[self._to_device(rows[use_last])]
        token_rows_T = rows_B if num_tokens == len(rows) else self._to_device(np.repeat(rows, q_lens))
        self._req_to_token[token_rows_T, positions_T] = out_cache_loc.to(torch.int32)
        sampled = _sampled_entries(step)
        wanted = [ends[sampled] - 1]
        for spec in step.input_logprobs:
            first = first_tokens[spec.entry] + spec.first
            wanted.append(np.arange(first, first + len(spec.targets) // 4))
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions_T,
            out_cache_loc=out_cache_loc,
            rows=rows_B,
            starts=starts.tolist(),
            q_lens=q_lens.tolist(),
            req_to_token=self._req_to_token,
            logit_indices=self._to_device(np.concatenate(wanted)),
        )
        return _Plan(batch, sampled, rows[sampled], starts[sampled] + q_lens[sampled])

    def _sample(self, logits_SV: Tensor, plan: _Plan, bad: set[int]) -> tuple[I32, list[TokenLogprob | None] | None]:
        if not len(plan.sampled):
            return np.empty(0, dtype=np.int32), None
        params = self._rows.params(plan.rows)
        edits = self._rows.edits(plan.rows, params, plan.positions)
        chosen = sample(logits_SV, params, plan.positions, edits, self._model.sampler)
        tokens = chosen.tokens.cpu().numpy()
        self._rows.record(plan.rows, params, chosen.tokens, tokens)
        bad.update(plan.sampled[~chosen.finite].tolist())
        return tokens.astype(np.int32), _sampled_logprobs(logits_SV, params, tokens)

    def _to_device(self, array: I64) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _sampled_entries(step: ForwardStep) -> I64:
    return np.flatnonzero(unpack_i32(step.sample))


def _i64(data: bytes) -> I64:
    """A writable copy: torch indexes with int64 and wants memory that it may write."""
    return unpack_i32(data).astype(np.int64)


def _sampled_logprobs(logits_SV: Tensor, params: RowParams, tokens: I64) -> list[TokenLogprob | None] | None:
    """Aligned with the samples; None in the place of rows that want none, and None at all where no row does."""
    wanted = np.flatnonzero(params["logprobs"] != NO_LOGPROBS)
    if not len(wanted):
        return None
    all_rows = len(wanted) == len(params)
    rows_NV = logits_SV if all_rows else logits_SV[torch.from_numpy(wanted).to(logits_SV.device)]
    result: list[TokenLogprob | None] = [None] * len(params)
    scores = score(rows_NV, tokens[wanted].tolist(), params["logprobs"][wanted].tolist())
    for i, scored in zip(wanted.tolist(), scores, strict=True):
        result[i] = scored.logprob
    return result


def _input_logprobs(logits_NV: Tensor, specs: list[InputLogprobSpec], bad: set[int]) -> list[list[TokenLogprob]]:
    """One list for each spec; entries whose logits are not finite join ``bad``."""
    result: list[list[TokenLogprob]] = []
    begin = 0
    for spec in specs:
        targets = unpack_i32(spec.targets).tolist()
        scores = score(logits_NV[begin : begin + len(targets)], targets, [spec.top_num] * len(targets))
        begin += len(targets)
        result.append([scored.logprob for scored in scores])
        if any(scored.bad for scored in scores):
            bad.add(spec.entry)
    return result
