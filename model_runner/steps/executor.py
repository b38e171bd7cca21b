"""The interface of what computes the parts of a step: the host itself, or a device beside it.

An executor owns the request table, the rows' state and the window pages, where it computes. ``StepRunner`` calls its
methods in the order of a step: changes, the pass, the choice of tokens, log-probabilities, copies to the host. The host
is done with each when the call returns (``host_executor.py``); a device has it queued (``device_executor.py``).

Arrays are NumPy's on the host, and tensors on a device.

Shapes: S sampled entries, L wanted rows of logits, N scored positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...messages.base import I32
from ...messages.worker import ForwardStep, RowInit
from ...runtime.layers_done import PassProgress
from ..batch.host_batch import HostBatch
from ..batch.step_plan import StepPlan
from ..device.base import Device, HostCopy
from ..grammar.matchers import MakesMatchers
from ..kv.pools import Pools
from ..sampling.row_params import F32, I64, RowParams
from ..sampling.rows import RowStates
from ..sampling.sampled import HostSampler, Sampled, Scored
from .common_steps import Chosen, CommonSteps, RequestTables


class StepEngine(Protocol):
    """What a step on the host needs of ``engines.base.Engine``; ``DeviceEngine`` is for a device."""

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of entries for which a graph of decode steps is captured, ascending; empty: none."""
        ...

    @property
    def sampler(self) -> HostSampler:
        """Sampler that chooses tokens from logits on the host."""
        ...

    def host_logits(self, batch: HostBatch) -> F32:
        """Compute a pass, write its KV into the pool, and return the logits at ``batch.logit_indices``, [L, V]."""
        ...

    def common_steps(self, tables: RequestTables) -> CommonSteps:
        """Return an object that computes a whole step in one call if the step wants sampled tokens alone.

        ``tables``: request table and rows' state, which it reads and writes.
        """
        ...


class Model(Protocol):
    """What a step needs of ``LoadedModel``."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        ...

    @property
    def device(self) -> Device:
        """Device that the model computes on."""
        ...

    @property
    def matchers(self) -> MakesMatchers:
        """Factory of matchers that constrain output to a grammar."""
        ...

    @property
    def pools(self) -> Pools:
        """KV pools that the steps' slots and pages belong to."""
        ...

    @property
    def engine(self) -> StepEngine:
        """Engine that computes the forward passes."""
        ...


class StepExecutor(Protocol):
    """Computes steps that are checked, one at a time."""

    rows: RowStates[Any]

    def launching(self) -> AbstractContextManager[object]:
        """Return the context manager that the caller enters while it launches a step."""
        ...

    def start(self, inits: Sequence[RowInit]) -> None:
        """Replace the sampling state of each row in which a new request starts."""
        ...

    def move_slots(self, row: int, start: int, slots: I32) -> None:
        """Map the positions of ``row``, from ``start`` on, to ``slots`` of the KV pool, in the request table."""
        ...

    def move_windows(self, pages: I32) -> None:
        """Map pages of the full pool to pages of the windowed layers' pool.

        ``pages`` [N, 2]: a page, and the window page that holds the same tokens (0: none).
        """
        ...

    def use_weights(self) -> None:
        """Use the engine's current weights for steps that are computed in one call (``run_common``).

        Call this after weights were loaded or given back.
        """
        ...

    def run_common(self, step: ForwardStep, done: PassProgress) -> Chosen | None:
        """Compute a step that wants tokens and nothing else in one call, and return its tokens.

        Return None, with nothing changed, if the step has to be computed part by part. ``done`` counts the computed
        layers.
        """
        ...

    def prepare(self, plan: StepPlan) -> int | None:
        """Bring the step's arrays to where it is computed, and write its slots into the request table.

        Return the number of entries of the graph to replay, or None to compute without a graph.
        """
        ...

    def compute(self, plan: StepPlan, done: PassProgress, size: int | None) -> Any:
        """Compute the prepared pass and return the wanted logits, [L, V]; a device only queues this.

        ``done`` counts the layers that have written their KV. ``size``: what ``prepare`` returned.
        """
        ...

    def choose(self, logits_LV: Any, plan: StepPlan, params: RowParams) -> Sampled[Any]:
        """Choose the sampled entries' tokens, return them, and keep each as its row's last token for the next step.

        ``params`` [S]: the sampling parameters of these rows.
        """
        ...

    def score_samples(self, logits_LV: Any, tokens_S: Any, wanted: I64, most: int) -> Scored[Any]:
        """Return log-probabilities of sampled tokens, each with its ``most`` likeliest alternatives.

        ``tokens_S``: tokens sampled from the first S rows of ``logits_LV``. ``wanted``: indices into ``tokens_S`` of
        those to score.
        """
        ...

    def score_prompt(self, logits_LV: Any, first: int, targets_N: I64, most: int) -> Scored[Any]:
        """Return the log-probability of each prompt token in ``targets_N`` under its row of the wanted logits.

        The rows begin with number ``first``. ``logits_LV``: what ``compute`` returned. Each comes with the ``most``
        likeliest alternatives.
        """
        ...

    def read_out(self, step: ForwardStep, plan: StepPlan, logits_LV: Any) -> list[Any]:
        """Return the vectors of the step's readouts that are complete with it, in their order.

        Call this after ``compute``. Sums of the others are kept.
        """
        ...

    def fetch(self, arrays: Sequence[Any]) -> HostCopy:
        """Start copies of the result arrays to the host and return them as pending, without waiting."""
        ...

    def capture_graphs(self) -> None:
        """Capture the graphs of decode steps now; do nothing if the engine has no graph sizes."""
        ...

    def drop_graphs(self) -> None:
        """Free the captured graphs. Steps are computed without graphs until ``capture_graphs`` is called again."""
        ...
