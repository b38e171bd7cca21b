"""Runs one ``ForwardStep`` after another: the device's request table, the pass, the samples, the ``StepResult``.

A step is applied in the order that ``ForwardStep`` fixes: rows that begin, slots that moved, the table positions of
this pass, the pass; then the sampled tokens enter the rows' state, where the next step's ``use_last`` finds them. The
scheduler may therefore send a step before it has the result of the one before.

    launch: plan → arrays to the device → table → pass → tokens chosen, into the rows' state   (nobody waits)
    collect: tokens, log-probabilities on the host → result                                    (waits for the device)

Steps are collected in the order they were launched. Nothing in a launch waits for a device that computes beside the
host (``Device.no_sync``), and only ``collect`` does: tokens are chosen and counted there (``sampling/device/``), and
log-probabilities are computed with the step.

On the CPU kernels the common step, which wants tokens and nothing else, is one call of theirs. What else there is goes
the general way: each part a call of its own, on any device. On a CPU all is done when ``launch`` returns. Steps that
decode only are graphs where the device has them (``decode_graphs.py``).

Shapes: T tokens, B entries, S sampled entries, L wanted rows of logits, R rows and C columns of the request table.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from ...messages.base import pack_i32, unpack_i32
from ...messages.outputs import TokenLogprob
from ...messages.worker import ForwardStep, StepResult
from ...runtime.layers_done import NOT_COUNTED, PassProgress
from ..batch.forward_batch import ForwardBatch
from ..batch.step_arrays import DeviceArrays, StepArrays
from ..batch.step_plan import StepPlan, plan_step, sampled_entries
from ..device.base import Device, HostCopy
from ..kv.pools import Pools
from ..ops.choose import choose_ops
from ..sampling.device.base import SampledRows
from ..sampling.device.choose import choose_sampler
from ..sampling.logit_edits.penalties import TokenHistory
from ..sampling.logprobs import Scored, listed, score
from ..sampling.row_params import NO_LOGPROBS, RowParams
from ..sampling.rows import RowStates
from ..sampling.rules import Sampled, sample
from .common_steps import ALL_GENERAL, CommonSteps, RequestTables
from .decode_graphs import DecodeGraphs, GraphModel
from .step_check import StepLimits, check_changes, check_entries

if TYPE_CHECKING:
    from ..sampling.native import NativeSampler

log = logging.getLogger(__name__)


class StepEngine(GraphModel, Protocol):
    """What a step needs of ``engines.base.Engine``."""

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Entries of decode steps to capture as graphs, ascending."""
        ...

    @property
    def logits_dtype(self) -> torch.dtype:
        """Type of the logits that ``compute`` returns."""
        ...

    @property
    def sampler(self) -> NativeSampler | None:
        """Chooses tokens on the CPU's vector units; None: operations of torch choose."""
        ...

    def common_steps(self, tables: RequestTables) -> CommonSteps:
        """Return what computes common steps over ``tables``."""
        ...


class Model(Protocol):
    """What a step needs of ``LoadedModel``."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def device(self) -> Device:
        """Where the model computes."""
        ...

    @property
    def pools(self) -> Pools:
        """KV pools that slots and pages are of."""
        ...

    @property
    def engine(self) -> StepEngine:
        """Computes the passes."""
        ...


class _Listing(NamedTuple):
    """Log-probabilities that were scored with a step. ``at``: the samples that they are of; ``entry``: or the entry
    whose prompt tokens.
    """

    scored: Scored
    top_nums: list[int]
    at: list[int] | None = None
    entry: int = -1


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that the device has. ``fetched``: its tokens ([S] int64), whether their logits were finite ([S] bool), and
    the arrays of each of ``listings``, in order.
    """

    step: ForwardStep
    begin: float
    """When it was launched (``time.perf_counter()``)."""
    plan: StepPlan
    fetched: HostCopy
    listings: list[_Listing]
    histories: list[tuple[int, TokenHistory]]
    """Histories of rows that count tokens on the host, each with the index of its sample."""
    arrays: list[npt.NDArray[Any]] = field(default_factory=list)
    """What was fetched, once somebody has waited for it."""


Launched = PendingStep | StepResult
"""The CPU kernels are through with a step when they return."""


class StepRunner:
    """Owns the device's request table and the rows' state. One thread."""

    def __init__(self, model: Model, max_reqs: int) -> None:
        self._model = model
        self._engine, pools = model.engine, model.pools
        self._device = device = model.device
        self._ops = choose_ops(device.torch)
        self._rows = RowStates(max_reqs, model.vocab_size, device.torch)
        self._req_to_token = torch.zeros((max_reqs, model.context_length), dtype=torch.int32, device=device.torch)
        self._page_size = pools.page_size
        pages, window_pages = pools.num_slots // pools.page_size, pools.num_window_pages
        self._limits = StepLimits(max_reqs, model.context_length, pools.num_slots, pages, window_pages)
        self._window_pages: Tensor | None = None
        """See ``ForwardBatch``; stays where it is, as the request table does."""
        if window_pages:
            self._window_pages = torch.zeros(pages, dtype=torch.int32, device=device.torch)
        self._arrays = StepArrays(device, max_reqs)
        self._graphs = DecodeGraphs(device, self._engine, self._engine.graph_sizes)
        # Graphs read it at every replay, so it is made once and stays.
        self._all_entries = torch.arange(max(self._engine.graph_sizes, default=0), device=device.torch)
        self._queued = choose_sampler(device, self._rows, self._engine.logits_dtype)
        self._open: list[PendingStep] = []
        """Launched and not fetched, in order."""
        self._ended_at = 0.0
        self._common: CommonSteps = ALL_GENERAL
        self.use_weights()

    def use_weights(self) -> None:
        """Compute common steps with the weights that the engine has now, if it has any."""
        # What computes them keeps weights alive: it goes before another one is made.
        self._common = ALL_GENERAL
        tables = RequestTables(self._req_to_token, self._rows.last_tokens, self._rows.table, self._window_pages)
        self._common = self._engine.common_steps(tables)

    def run(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> StepResult:
        """Launch the step and wait for it."""
        return self.collect(self.launch(step, done))

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the graphs of decode steps, where there are any; after a warm-up, with no step open."""
        if self._engine.graph_sizes:
            self._arrays.clear()
            self._graphs.capture(self._padded_batch)

    def drop_graphs(self) -> None:
        """Compute without, until they are captured again; no step is open."""
        self._graphs.drop()

    @torch.inference_mode()
    def launch(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Launched:
        """Apply the step and have it computed, counting layers that are ``done``.

        Raises ``ValueError`` or ``IndexError`` where the step contradicts itself or the table: the scheduler's books
        are wrong then.
        """
        begin = time.perf_counter()
        with self._device.no_sync():
            if step.new_rows or step.slot_deltas or step.window_pages is not UNSET:
                check_changes(step, self._limits)
                self._apply(step)
            if (chosen := self._common.run(step, done)) is not None:
                bad_entries = [] if chosen.finite.all() else sampled_entries(step)[~chosen.finite].tolist()
                forward_ms = (time.perf_counter() - begin) * 1e3
                return StepResult(step.step_id, chosen.tokens, forward_ms, bad_entries=bad_entries)
            check_entries(step, self._limits)
            pending = self._launch_generally(step, begin, done)
            self._open.append(pending)
            return pending

    def follow(self, step: ForwardStep) -> None:
        """Compute a step whose result another rank tells: nothing is packed. Of a device that computes beside the host
        the step before is waited for, as its arrays are the next one's.
        """
        self.launch(step)
        self.settle(1 if self._device.beside else 0)

    def settle(self, open_steps: int = 0) -> None:
        """Wait until no more than so many steps are open; they are never collected."""
        for pending in self._open[: max(0, len(self._open) - open_steps)]:
            self._wait(pending)

    def is_done(self, launched: Launched) -> bool:
        """Whether ``collect`` would return without waiting for the device."""
        return isinstance(launched, StepResult) or bool(launched.arrays) or launched.fetched.is_done()

    def collect(self, launched: Launched) -> StepResult:
        """The step's result; waits for the device, and with it for the pages that are pushed to a peer next.

        ``forward_ms`` is the time from its launch, or from the end of the step before, to its end.
        """
        if isinstance(launched, StepResult):
            return launched
        tokens, finite, *scores = self._wait(launched)
        end = time.perf_counter()
        forward_ms, self._ended_at = (end - max(launched.begin, self._ended_at)) * 1e3, end
        bad = set(launched.plan.sampled[~finite].tolist())
        logprobs, input_logprobs = _logprobs(launched.listings, scores, len(tokens), bad)
        return StepResult(
            step_id=launched.step.step_id,
            next_tokens=pack_i32(tokens),
            forward_ms=forward_ms,
            logprobs=logprobs,
            input_logprobs=input_logprobs,
            bad_entries=sorted(bad),
        )

    def _launch_generally(self, step: ForwardStep, begin: float, done: PassProgress) -> PendingStep:
        plan, size, there = self._prepare(step)
        logits_LV = self._compute(plan, there, done) if size is None else self._replay(plan, there, size)
        if self._queued is None or not self._queued.reads_halves:
            logits_LV = logits_LV.float()
        params = self._rows.params(plan.sampled_rows)
        chosen = self._choose(logits_LV[: len(plan.sampled)], plan, there, params)
        listings = self._listings(step, logits_LV, params, chosen.tokens)
        fetched = self._fetch(chosen, listings)
        histories = [] if self._queued is not None else self._rows.histories(plan.sampled_rows, params)
        return PendingStep(step, begin, plan, fetched, listings, histories)

    def _prepare(self, step: ForwardStep) -> tuple[StepPlan, int | None, DeviceArrays]:
        """Send the step's arrays to the device; with them, the size of the graph that computes it (None: without)."""
        plan = plan_step(step, self._page_size)
        size = self._graphs.size_for(len(plan.rows)) if plan.is_decode else None
        there = self._arrays.load(plan, size or 0)
        self._ops.enter(there, self._req_to_token, self._rows.last_tokens)
        return plan, size, there

    def _fetch(self, chosen: Sampled, listings: list[_Listing]) -> HostCopy:
        """Start copies of the results to the host."""
        return self._device.fetch([*chosen, *(tensor for listing in listings for tensor in listing.scored)])

    def _compute(self, plan: StepPlan, there: DeviceArrays, done: PassProgress) -> Tensor:
        if self._device.beside:
            done.mark_by(self._device.mark)
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
            begun_at=there.begun_at,
            host_rows=plan.rows,
        )
        self._engine.prepare(batch)
        return self._engine.compute(batch)

    def _replay(self, plan: StepPlan, there: DeviceArrays, size: int) -> Tensor:
        batch = self._padded_batch(size)
        count = len(plan.rows)
        batch.starts[:count] = plan.starts.tolist()
        batch.begun_at = there.begun_at
        batch.host_rows[:count] = plan.rows
        logits_SV = self._graphs.run(batch)
        # As a rule every entry samples, and nothing is copied.
        everyone = len(plan.logit_indices) == count and len(plan.sampled) == count
        return logits_SV[:count] if everyone else logits_SV.index_select(0, there.logit_indices)

    def _padded_batch(self, size: int) -> ForwardBatch:
        """A decode step of ``size`` entries, of which all is padding as far as the host knows."""
        there = self._arrays.padded(size)
        return ForwardBatch(
            *there[:4],
            starts=[0] * size,
            q_lens=[1] * size,
            req_to_token=self._req_to_token,
            logit_indices=self._all_entries[:size],
            window_pages=self._window_pages,
            begun_at=there.input_ids[:0],
            host_rows=np.zeros(size, dtype=np.int64),
            is_captured=True,
        )

    def _choose(self, logits_SV: Tensor, plan: StepPlan, there: DeviceArrays, params: RowParams) -> Sampled:
        """The rows' tokens, which are their last ones from here on."""
        rows, positions = plan.sampled_rows, plan.sampled_positions
        if not len(params):
            nothing = torch.empty(0, dtype=torch.int64, device=self._device.torch)
            return Sampled(nothing, nothing.bool())
        if self._queued is not None:
            on_device = there.sampled_rows, there.sampled_positions
            return self._queued.sample(logits_SV, SampledRows(rows, positions, params, *on_device))
        if params["penalised"].any():
            for earlier in list(self._open):
                self._wait(earlier)
        edits = self._rows.edits(rows, params, positions)
        chosen = sample(logits_SV, params, positions, edits, self._engine.sampler)
        self._rows.last_tokens.index_copy_(0, there.sampled_rows, chosen.tokens)
        return chosen

    def _listings(self, step: ForwardStep, logits_LV: Tensor, params: RowParams, tokens: Tensor) -> list[_Listing]:
        """What is to be told of probabilities: of the samples, then of each ``InputLogprobSpec``."""
        listings, count = [], len(params)
        score_rows = score if self._queued is None else self._queued.score
        wanted = np.flatnonzero(params["logprobs"] != NO_LOGPROBS)
        if len(wanted):
            logits_NV, top_nums = logits_LV[:count], params["logprobs"][wanted].tolist()
            if len(wanted) < count:
                at = self._device.upload(wanted)
                logits_NV, tokens = logits_NV.index_select(0, at), tokens.index_select(0, at)
            listings.append(_Listing(score_rows(logits_NV, tokens, max(top_nums)), top_nums, at=wanted.tolist()))
        begin = count
        for spec in step.input_logprobs:
            targets = unpack_i32(spec.targets).astype(np.int64)
            scored = score_rows(logits_LV[begin : begin + len(targets)], self._device.upload(targets), spec.top_num)
            listings.append(_Listing(scored, [spec.top_num] * len(targets), entry=spec.entry))
            begin += len(targets)
        return listings

    def _wait(self, pending: PendingStep) -> list[npt.NDArray[Any]]:
        """What was fetched of the step; waits for it. The first time, histories are told."""
        if not pending.arrays:
            self._open.remove(pending)
            pending.arrays = pending.fetched.wait()
            for i, history in pending.histories:
                history.append(int(pending.arrays[0][i]))
        return pending.arrays

    def _apply(self, step: ForwardStep) -> None:
        for init in step.new_rows:
            self._rows.start(init)
            log.debug("takes row %d", init.row, extra={"rid": init.rid})
        if self._queued is not None and step.new_rows:
            self._queued.start(step.new_rows)
        for delta in step.slot_deltas:
            slots = self._device.upload(unpack_i32(delta.slots))
            self._req_to_token[delta.row, delta.start : delta.start + len(slots)] = slots
        if self._window_pages is not None and not isinstance(step.window_pages, UnsetType):
            pages = self._device.upload(unpack_i32(step.window_pages).reshape(-1, 2))
            self._window_pages.index_copy_(0, pages[:, 0].long(), pages[:, 1])


def _logprobs(
    listings: list[_Listing], arrays: list[npt.NDArray[Any]], count: int, bad: set[int]
) -> tuple[list[TokenLogprob | None] | None, list[list[TokenLogprob]]]:
    """Of the samples: aligned with them, None in the place of rows that want none, and None at all where no row does.
    And one list for each ``InputLogprobSpec``, whose entries join ``bad`` where their logits are not finite.
    """
    sampled: list[TokenLogprob | None] | None = None
    inputs: list[list[TokenLogprob]] = []
    width = len(Scored._fields)
    for number, listing in enumerate(listings):
        scores = listed(arrays[number * width : (number + 1) * width], listing.top_nums)
        if listing.at is None:
            inputs.append([scored.logprob for scored in scores])
            if any(scored.bad for scored in scores):
                bad.add(listing.entry)
        else:
            sampled = [None] * count
            for i, scored in zip(listing.at, scores, strict=True):
                sampled[i] = scored.logprob
    return sampled, inputs
