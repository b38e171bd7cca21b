"""Steps that the host computes itself, in NumPy's arrays: everything is done when a call returns.

On the C++ engine the common step, which wants tokens and nothing else, is one call. What else there is goes the general
way: each part a call of its own, on any engine.

Shapes: T tokens, S sampled entries, L wanted rows of logits, R rows and C columns of the request table.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from ...messages.base import I32
from ...messages.worker import ForwardStep, RowInit
from ...runtime.layers_done import PassProgress
from ..batch.hidden import HostHidden, no_hidden
from ..batch.host_batch import HostBatch
from ..batch.step_plan import StepPlan
from ..readouts.reader import ReadoutMaker
from ..sampling.choose_tokens import choose_tokens
from ..sampling.logprobs import score
from ..sampling.row_params import F32, I64, RowParams
from ..sampling.rows import RowStates, host_rows
from ..sampling.sampled import F64, HostArray, Sampled, Scored
from .common_steps import ALL_GENERAL, Chosen, CommonSteps, RequestTables
from .executor import Model


class _There:
    """Results that lie on the host already."""

    def __init__(self, arrays: Sequence[HostArray]) -> None:
        self._arrays = list(arrays)

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[HostArray]:
        return self._arrays


class HostExecutor:
    """Executor of steps that the host computes itself, in NumPy arrays. Each call returns when its work is done."""

    def __init__(self, model: Model, max_reqs: int) -> None:
        self._engine = model.engine
        self.rows: RowStates[I64] = host_rows(max_reqs, model.vocab_size, model.matchers)
        self.req_to_token = np.zeros((max_reqs, model.context_length), dtype=np.int32)
        """[R, C]; its memory is taken as it is first written."""
        pages, has_windows = model.pools.num_slots // model.pools.page_size, bool(model.pools.num_window_pages)
        self.window_pages = np.zeros(pages, dtype=np.int32) if has_windows else None
        """[P] int32: page of the windowed layers' pool for each page; None if no layer has a window."""
        self.common: CommonSteps = ALL_GENERAL
        """Computes common steps, with the weights that the engine has."""
        self._readouts = ReadoutMaker(np.float64, self._score_labels)
        self._hidden = no_hidden()
        """Hidden states of the pass that was computed last, until they are read out."""

    def launching(self) -> AbstractContextManager[object]:
        """Return a context that does nothing: there is no device to wait for."""
        return nullcontext()

    def start(self, inits: Sequence[RowInit]) -> None:
        """Replace the sampling state of each new request's row."""
        for init in inits:
            self.rows.start(init)

    def move_slots(self, row: int, start: int, slots: I32) -> None:
        """Write ``slots`` into the request table at once, from position ``start`` of ``row`` on."""
        self.req_to_token[row, start : start + len(slots)] = slots

    def move_windows(self, pages: I32) -> None:
        """Write the pairs (page, window page) into ``window_pages`` at once; do nothing if no layer has a window."""
        if self.window_pages is not None:
            self.window_pages[pages[:, 0]] = pages[:, 1]

    def use_weights(self) -> None:
        """Replace ``common``, by which whole steps are computed in one call, by one with the engine's current weights.

        Call this when weights were dropped or loaded again. The old one is dropped first, so that its weights can be
        freed.
        """
        # What computes common steps keeps weights alive: it goes before another one is made.
        self.common = ALL_GENERAL
        tables = RequestTables(self.req_to_token, self.rows.last_tokens, self.rows.table, self.window_pages)
        self.common = self._engine.common_steps(tables)

    def run_common(self, step: ForwardStep, done: PassProgress) -> Chosen | None:
        """Compute the step in one call of the engine, and return its tokens; ``done`` counts the computed layers.

        Return None, with nothing changed, if the step has to be computed part by part.
        """
        return self.common.run(step, done)

    def prepare(self, plan: StepPlan) -> None:
        """Put the rows' last tokens into the plan's ``input_ids``, and write the step's slots into the request table.

        Return None: the host has no graphs.
        """
        plan.input_ids[plan.last_at] = self.rows.last_tokens[plan.last_rows]
        self.req_to_token[plan.token_rows, plan.positions] = plan.out_cache_loc

    def compute(self, plan: StepPlan, done: PassProgress, size: int | None) -> F32:
        """Compute the pass by the engine, and return the wanted logits, [L, V] float32.

        ``done`` counts the computed layers. ``size`` is ignored: the host has no graphs.
        """
        self._hidden = HostHidden(plan.hidden_tokens)
        return self._engine.host_logits(
            HostBatch(
                input_ids=plan.input_ids,
                positions=plan.positions,
                out_cache_loc=plan.out_cache_loc,
                rows=plan.rows,
                starts=plan.starts,
                q_lens=plan.q_lens,
                req_to_token=self.req_to_token,
                logit_indices=plan.logit_indices,
                begun_at=plan.begun_at,
                done=done,
                prompt_lens=self.rows.table["prompt_len"][plan.rows],
                window_pages=self.window_pages,
                hidden=self._hidden,
            )
        )

    def choose(self, logits_LV: F32, plan: StepPlan, params: RowParams) -> Sampled[HostArray]:
        """Choose the sampled entries' tokens by the engine's sampler, and return them.

        Also update the rows' last tokens, penalty histories and grammar matchers. ``logits_LV`` may be changed.
        """
        rows, positions = plan.sampled_rows, plan.sampled_positions
        logits_SV = logits_LV[: len(rows)]
        chosen = choose_tokens(logits_SV, self.rows, rows, params, positions, self._engine.sampler)
        self.rows.last_tokens[rows] = chosen.tokens
        for i, history in self.rows.histories(rows, params):
            history.append(int(chosen.tokens[i]))
        self.rows.grammars.accept(rows, params, chosen.tokens)
        return chosen

    def score_samples(self, logits_LV: F32, tokens_S: I64, wanted: I64, most: int) -> Scored[HostArray]:
        """Compute the log-probabilities of the tokens at the indices ``wanted`` in NumPy, as float32.

        Each comes with its ``most`` likeliest alternatives.
        """
        return score(logits_LV, wanted, tokens_S[wanted], most, self._engine.sampler)

    def score_prompt(self, logits_LV: F32, first: int, targets_N: I64, most: int) -> Scored[HostArray]:
        """Compute the log-probability of each token in ``targets_N`` in NumPy, as float32, by rows from ``first`` on.

        Each comes with the ``most`` likeliest alternatives at its position.
        """
        return score(logits_LV, np.arange(first, first + len(targets_N)), targets_N, most, self._engine.sampler)

    def read_out(self, step: ForwardStep, plan: StepPlan, logits_LV: F32) -> list[HostArray]:
        """Return the vectors of the step's readouts that are complete with it, in their order."""
        # Not kept until the next pass: a long prompt's states may be hundreds of megabytes.
        hidden, self._hidden = self._hidden, no_hidden()
        return self._readouts.make(step.readouts, plan, hidden.states, logits_LV)

    def _score_labels(self, logits_LV: F32, row: int, labels: I64) -> F64:
        log_sum = self._engine.sampler.log_sums(logits_LV, np.array([row]))[0]
        logprobs: F64 = logits_LV[row, labels] - log_sum
        return logprobs

    def fetch(self, arrays: Sequence[HostArray]) -> _There:
        """Return the arrays as a finished copy: they are on the host already."""
        return _There(arrays)

    def capture_graphs(self) -> None:
        """Do nothing: the host has no graphs."""

    def drop_graphs(self) -> None:
        """Do nothing: the host has no graphs."""
