"""Runs one ``ForwardStep`` after another: the device's request table, the pass, the samples, the ``StepResult``.

A step is applied in the order that ``ForwardStep`` fixes: rows that begin, slots that moved, the table positions of
this pass, the pass; then the sampled tokens enter the rows' state, where the next step's ``use_last`` finds them. The
scheduler may therefore send a step before it has the result of the one before.

    launch: plan → arrays to the device → table → pass → tokens chosen, into the rows' state   (nobody waits)
    collect: tokens, log-probabilities to the host → histories of penalties → result           (waits for the device)

Steps are collected in the order they were launched. What of a launch does wait for the step before: the choice for rows
whose penalties count that step's tokens, which the host does; and draws by the torch sampler on an accelerator.

On the CPU kernels the common step, which wants tokens and nothing else, is one call of theirs. What else there is goes
the general way: each part a call of its own, on any device. On a CPU all is done when ``launch`` returns.

Shapes: T tokens, B entries, S sampled entries, L wanted rows of logits, R rows and C columns of the request table.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from ..messages.base import pack_i32, unpack_i32
from ..messages.outputs import TokenLogprob
from ..messages.worker import ForwardStep, InputLogprobSpec, StepResult
from ..runtime.layers_done import LayersDone
from .forward_batch import ForwardBatch
from .logprobs import score
from .penalties import TokenHistory
from .rows import NO_LOGPROBS, RowParams, RowStates
from .sampler import Sampled, sample
from .step_arrays import StepArrays
from .step_check import StepLimits, check_changes, check_entries
from .step_plan import I64, StepPlan, plan_step, sampled_entries

if TYPE_CHECKING:
    from .kernels.cpu_engine import CpuEngine
    from .kernels.native_steps import NativeSteps
    from .kernels.sampling import NativeSampler

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
    page_size: int
    num_window_pages: int

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits, [L, V] float32."""
        ...


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that the device has. ``tokens`` ([S] int64) and ``finite`` ([S] bool: the logits were) lie there."""

    step: ForwardStep
    begin: float
    """When it was launched (``time.perf_counter()``)."""
    plan: StepPlan
    params: RowParams
    """[S]: of the rows that sample, as they were."""
    tokens: Tensor
    finite: Tensor
    histories: list[tuple[int, TokenHistory]]
    """Who counts the tokens, and which of them."""
    logits: Tensor | None
    """[L, V]; kept where log-probabilities are wanted."""
    host_tokens: I64 | None = None
    """[S], once somebody has waited for them."""


Launched = PendingStep | StepResult
"""The CPU kernels are through with a step when they return."""


class StepRunner:
    """Owns the device's request table and the rows' state. One thread."""

    def __init__(self, model: Model, max_reqs: int) -> None:
        self._model = model
        self._device = model.device
        self._rows = rows = RowStates(max_reqs, model.vocab_size, model.device)
        self._req_to_token = torch.zeros((max_reqs, model.context_length), dtype=torch.int32, device=model.device)
        pages, window_pages = model.num_slots // model.page_size, model.num_window_pages
        self._limits = StepLimits(max_reqs, model.context_length, model.num_slots, pages, window_pages)
        self._window_pages: Tensor | None = None
        """See ``ForwardBatch``; stays where it is, as the request table does."""
        if window_pages:
            self._window_pages = torch.zeros(pages, dtype=torch.int32, device=model.device)
        self._arrays = StepArrays(model.device, max_reqs)
        self._open: list[PendingStep] = []
        """Launched and not fetched, in order."""
        self._ended_at = 0.0
        self._native: NativeSteps | None = None
        if model.engine is not None:
            # Imported here: it loads the compiled kernels.
            from .kernels.native_steps import NativeSteps

            tables = (self._req_to_token, rows.last_tokens, rows.table)
            self._native = NativeSteps(
                model.engine, *tables, clear_begun=model.clears_begun_pages, window_pages=self._window_pages
            )

    def run(self, step: ForwardStep, done: LayersDone | None = None) -> StepResult:
        """Launch the step and wait for it."""
        return self.collect(self.launch(step, done))

    @torch.inference_mode()
    def launch(self, step: ForwardStep, done: LayersDone | None = None) -> Launched:
        """Apply the step and have it computed, counting layers that are ``done``.

        Raises ``ValueError`` or ``IndexError`` where the step contradicts itself or the table: the scheduler's books
        are wrong then.
        """
        begin = time.perf_counter()
        if step.new_rows or step.slot_deltas or step.window_pages is not UNSET:
            check_changes(step, self._limits)
            self._apply(step)
        if self._native is not None and (chosen := self._native.run(step, done)) is not None:
            bad_entries = [] if chosen.finite.all() else sampled_entries(step)[~chosen.finite].tolist()
            forward_ms = (time.perf_counter() - begin) * 1e3
            return StepResult(step.step_id, chosen.tokens, forward_ms, bad_entries=bad_entries)
        check_entries(step, self._limits)
        pending = self._launch_generally(step, begin, done)
        self._open.append(pending)
        return pending

    def follow(self, step: ForwardStep) -> None:
        """Compute a step whose result another rank tells: nothing is scored or packed."""
        if isinstance(launched := self.launch(step), PendingStep):
            self._fetch(launched)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> StepResult:
        """The step's result; waits for the device. ``forward_ms`` is the time from its launch, or from the end of the
        step before, to its end.
        """
        if isinstance(launched, StepResult):
            return launched
        tokens = self._fetch(launched)
        if self._device.type == "cuda":
            # Pages of this step may be pushed to a peer as soon as we return, also where it samples nothing.
            torch.cuda.synchronize(self._device)
        bad = set(launched.plan.sampled[~launched.finite.cpu().numpy()].tolist())
        logprobs, input_logprobs = None, list[list[TokenLogprob]]()
        if launched.logits is not None:
            logprobs = _sampled_logprobs(launched.logits[: len(tokens)], launched.params, tokens)
            input_logprobs = _input_logprobs(launched.logits[len(tokens) :], launched.step.input_logprobs, bad)
        end = time.perf_counter()
        forward_ms, self._ended_at = (end - max(launched.begin, self._ended_at)) * 1e3, end
        return StepResult(
            step_id=launched.step.step_id,
            next_tokens=pack_i32(tokens),
            forward_ms=forward_ms,
            logprobs=logprobs,
            input_logprobs=input_logprobs,
            bad_entries=sorted(bad),
        )

    def _launch_generally(self, step: ForwardStep, begin: float, done: LayersDone | None) -> PendingStep:
        plan = plan_step(step)
        there = self._arrays.load(plan)
        there.input_ids[there.last_at] = self._rows.last_tokens[there.last_rows]
        self._req_to_token[there.token_rows, there.positions] = there.out_cache_loc.to(torch.int32)
        batch = ForwardBatch(
            input_ids=there.input_ids,
            positions=there.positions,
            out_cache_loc=there.out_cache_loc,
            rows=there.rows,
            starts=plan.starts.tolist(),
            q_lens=plan.q_lens.tolist(),
            req_to_token=self._req_to_token,
            logit_indices=there.logit_indices,
            done=done,
            prompt_lens=self._rows.table["prompt_len"][plan.rows].tolist(),
            window_pages=self._window_pages,
        )
        logits_LV = self._model.forward(batch)
        params = self._rows.params(plan.sampled_rows)
        chosen = self._choose(logits_LV[: len(plan.sampled)], plan, params)
        self._rows.last_tokens[there.sampled_rows] = chosen.tokens
        wants_logits = step.input_logprobs or (params["logprobs"] != NO_LOGPROBS).any()
        histories = self._rows.histories(plan.sampled_rows, params)
        return PendingStep(step, begin, plan, params, *chosen, histories, logits_LV if wants_logits else None)

    def _choose(self, logits_SV: Tensor, plan: StepPlan, params: RowParams) -> Sampled:
        if not len(params):
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return Sampled(nothing, nothing.bool())
        if params["penalised"].any():
            for earlier in list(self._open):
                self._fetch(earlier)
        edits = self._rows.edits(plan.sampled_rows, params, plan.sampled_positions)
        return sample(logits_SV, params, plan.sampled_positions, edits, self._model.sampler)

    def _fetch(self, pending: PendingStep) -> I64:
        """[S]: the step's tokens, on the host; waits for them. The first time, histories are told."""
        if pending.host_tokens is None:
            self._open.remove(pending)
            pending.host_tokens = pending.tokens.cpu().numpy()
            for i, history in pending.histories:
                history.append(int(pending.host_tokens[i]))
        return pending.host_tokens

    def _apply(self, step: ForwardStep) -> None:
        for init in step.new_rows:
            self._rows.start(init)
            log.debug("takes row %d", init.row, extra={"rid": init.rid})
        for delta in step.slot_deltas:
            # A copy, because torch wants writable memory.
            slots = torch.from_numpy(unpack_i32(delta.slots).copy())
            self._req_to_token[delta.row, delta.start : delta.start + len(slots)] = slots.to(self._device)
        if self._window_pages is not None and not isinstance(step.window_pages, UnsetType):
            pages = torch.from_numpy(unpack_i32(step.window_pages).reshape(-1, 2).copy()).to(self._device)
            self._window_pages[pages[:, 0].long()] = pages[:, 1]


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
