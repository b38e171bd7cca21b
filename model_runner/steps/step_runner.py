"""Runs one ``ForwardStep`` after another: the request table, the pass, the samples, the ``StepResult``.

``ForwardStep`` fixes the order in which a step is applied: rows that begin, slots that moved, the table positions of
this pass, the pass. Then the sampled tokens enter the rows' state, where the next step's ``use_last`` finds them. So
the scheduler may send a step before it has the result of the one before.

    launch: plan → arrays to the device → table → pass → tokens chosen, into the rows' state   (nothing waits)
    collect: tokens, log-probabilities on the host → result                                    (waits for the device)

Steps are collected in the order they were launched. What is common to all devices is here. An executor
(``executor.py``) computes the parts of a step: the host's own, without torch, or that of a device beside the host. The
latter never waits in a launch. On a CPU all is done when ``launch`` returns.

Shapes: T tokens, S sampled entries, L wanted rows of logits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from ...messages.base import pack_i32, unpack_i32
from ...messages.outputs import TokenLogprob
from ...messages.worker import ForwardStep, StepResult
from ...runtime.layers_done import NOT_COUNTED, PassProgress
from ..batch.step_plan import StepPlan, plan_step, sampled_entries
from ..device.base import HostCopy
from ..readouts.reader import bad_entries, packed
from ..sampling.logprobs import listed
from ..sampling.row_params import NO_LOGPROBS, RowParams
from ..sampling.sampled import HostArray, Sampled, Scored
from .executor import Model, StepExecutor
from .make_executor import make_executor
from .step_check import StepLimits, check_changes, check_entries

log = logging.getLogger(__name__)


class _Listing(NamedTuple):
    """Log-probabilities that were scored with a step."""

    scored: Scored[Any]
    top_nums: list[int]
    at: list[int] | None = None
    """Samples that they are of; None: they are of a prompt."""
    entry: int = -1
    """Entry with the prompt, where ``at`` is None."""


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that is launched."""

    step: ForwardStep
    begin: float
    """When it was launched (``time.perf_counter()``)."""
    plan: StepPlan
    fetched: HostCopy
    """Its tokens ([S] int64), whether their logits were finite ([S] bool), the arrays of each of ``listings``, and
    vectors of readouts.
    """
    listings: list[_Listing]
    arrays: list[HostArray] = field(default_factory=list)
    """What was fetched, once it was waited for."""


Launched = PendingStep | StepResult
"""A common step on the CPU kernels is a result when it is launched."""


class StepRunner:
    """Owns the request table and the rows' state, by its executor. One thread."""

    def __init__(self, model: Model, max_reqs: int) -> None:
        self._model = model
        pools = model.pools
        self._page_size = pools.page_size
        pages, window_pages = pools.num_slots // pools.page_size, pools.num_window_pages
        self._limits = StepLimits(max_reqs, model.context_length, pools.num_slots, pages, window_pages)
        self.executor: StepExecutor = make_executor(model, max_reqs)
        """Computes the parts of the steps."""
        self._open: list[PendingStep] = []
        """Launched and not fetched, in order."""
        self._ended_at = 0.0
        self.use_weights()

    def use_weights(self) -> None:
        """Use the engine's current weights for steps that the engine computes in one call.

        Call this after weights were loaded or given back.
        """
        self.executor.use_weights()

    def run(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> StepResult:
        """Launch the step, wait until it has ended, and return its result. ``done`` counts the computed layers."""
        return self.collect(self.launch(step, done))

    def capture_graphs(self) -> None:
        """Capture the graphs of decode steps, if the engine has any. Call this after a warm-up, with no step open."""
        self.executor.capture_graphs()

    def drop_graphs(self) -> None:
        """Free the graphs, with no step open. Steps are computed without graphs until they are captured again."""
        self.executor.drop_graphs()

    def launch(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Launched:
        """Check the step, apply its new rows and moved slots, and compute its pass; a device only queues it.

        Return the result of a step that the engine computes in one call, and else a ``PendingStep`` to collect.
        ``done`` counts the layers that have written their KV. Raises ``ValueError`` or ``IndexError`` if the step
        contradicts itself or the table, which means that the scheduler has a fault.
        """
        begin = time.perf_counter()
        with self.executor.launching():
            if step.new_rows or step.slot_deltas or step.window_pages is not UNSET:
                check_changes(step, self._limits)
                self._apply(step)
            if (chosen := self.executor.run_common(step, done)) is not None:
                bad_entries = [] if chosen.finite.all() else sampled_entries(step)[~chosen.finite].tolist()
                forward_ms = (time.perf_counter() - begin) * 1e3
                return StepResult(step.step_id, chosen.tokens, forward_ms, bad_entries=bad_entries)
            check_entries(step, self._limits)
            pending = self._launch_generally(step, begin, done)
            self._open.append(pending)
            return pending

    def follow(self, step: ForwardStep) -> None:
        """Launch a step of which another rank reports the result; this rank drops its own.

        On the CPU this waits for the step to end. On a GPU it waits only for the step before, because the next step
        uses its arrays.
        """
        self.launch(step)
        self.settle(1 if self._model.device.beside else 0)

    def settle(self, open_steps: int = 0) -> None:
        """Wait for the oldest launched steps, until at most ``open_steps`` have not ended.

        Their results are kept in their ``PendingStep`` for ``collect``.
        """
        for pending in self._open[: max(0, len(self._open) - open_steps)]:
            self._wait(pending)

    def is_done(self, launched: Launched) -> bool:
        """Return whether ``collect`` of this step would return without waiting for the device."""
        return isinstance(launched, StepResult) or bool(launched.arrays) or launched.fetched.is_done()

    def collect(self, launched: Launched) -> StepResult:
        """Wait until the step has ended, and return its result; the KV of all its layers is then in the pool.

        ``forward_ms`` counts from its launch, or from the end of the step before if that was later, to its end.
        """
        if isinstance(launched, StepResult):
            return launched
        tokens, finite, *scores = self._wait(launched)
        end = time.perf_counter()
        forward_ms, self._ended_at = (end - max(launched.begin, self._ended_at)) * 1e3, end
        bad = set(launched.plan.sampled[~finite].tolist())
        logprobs, input_logprobs = _logprobs(launched.listings, scores, len(tokens), bad)
        vectors = scores[len(launched.listings) * len(Scored._fields) :]
        bad |= bad_entries(launched.step.readouts, vectors)
        return StepResult(
            step_id=launched.step.step_id,
            next_tokens=pack_i32(tokens),
            forward_ms=forward_ms,
            logprobs=logprobs,
            input_logprobs=input_logprobs,
            readouts=[packed(vector) for vector in vectors],
            bad_entries=sorted(bad),
        )

    def _launch_generally(self, step: ForwardStep, begin: float, done: PassProgress) -> PendingStep:
        plan, size = self._prepare(step)
        logits_LV = self._compute(plan, done, size)
        params = self.executor.rows.params(plan.sampled_rows)
        chosen = self._choose(logits_LV, plan, params)
        listings = self._listings(step, logits_LV, params, chosen.tokens)
        vectors = self.executor.read_out(step, plan, logits_LV)
        return PendingStep(step, begin, plan, self._fetch(chosen, listings, vectors), listings)

    def _prepare(self, step: ForwardStep) -> tuple[StepPlan, int | None]:
        plan = plan_step(step, self._page_size)
        return plan, self.executor.prepare(plan)

    def _compute(self, plan: StepPlan, done: PassProgress, size: int | None) -> Any:
        return self.executor.compute(plan, done, size)

    def _choose(self, logits_LV: Any, plan: StepPlan, params: RowParams) -> Sampled[Any]:
        return self.executor.choose(logits_LV, plan, params)

    def _listings(self, step: ForwardStep, logits_LV: Any, params: RowParams, tokens: Any) -> list[_Listing]:
        """Have the executor score what the step wants log-probabilities of, and return the scores, maybe still pending.

        The samples come first if any wants them, then each ``InputLogprobSpec``. ``params``: sampling parameters of the
        sampled entries. ``tokens``: the tokens that were sampled.
        """
        listings = []
        wanted = np.flatnonzero(params["logprobs"] != NO_LOGPROBS)
        if len(wanted):
            top_nums = params["logprobs"][wanted].tolist()
            scored = self.executor.score_samples(logits_LV, tokens, wanted, max(top_nums))
            listings.append(_Listing(scored, top_nums, at=wanted.tolist()))
        begin = len(params)
        for spec in step.input_logprobs:
            targets = unpack_i32(spec.targets).astype(np.int64)
            scored = self.executor.score_prompt(logits_LV, begin, targets, spec.top_num)
            listings.append(_Listing(scored, [spec.top_num] * len(targets), entry=spec.entry))
            begin += len(targets)
        return listings

    def _fetch(self, chosen: Sampled[Any], listings: Sequence[_Listing], vectors: Sequence[Any]) -> HostCopy:
        return self.executor.fetch([*chosen, *(array for listing in listings for array in listing.scored), *vectors])

    def _wait(self, pending: PendingStep) -> list[HostArray]:
        """Wait for the step's copies to the host and return them. The step is no longer open then."""
        if not pending.arrays:
            self._open.remove(pending)
            pending.arrays = pending.fetched.wait()
        return pending.arrays

    def _apply(self, step: ForwardStep) -> None:
        self.executor.start(step.new_rows)
        for init in step.new_rows:
            log.debug("takes row %d", init.row, extra={"rid": init.rid})
        for delta in step.slot_deltas:
            self.executor.move_slots(delta.row, delta.start, unpack_i32(delta.slots))
        if not isinstance(step.window_pages, UnsetType):
            self.executor.move_windows(unpack_i32(step.window_pages).reshape(-1, 2))


def _logprobs(
    listings: list[_Listing], arrays: list[HostArray], count: int, bad: set[int]
) -> tuple[list[TokenLogprob | None] | None, list[list[TokenLogprob]]]:
    """Return the log-probabilities of the samples, and a list of them for each ``InputLogprobSpec``.

    ``arrays``: the scores of all ``listings`` on the host. ``count``: number of sampled tokens. Samples that want none
    have None, and the whole list is None if all want none. Prompt entries with logits that are not finite are added to
    ``bad``.
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
