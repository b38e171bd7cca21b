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
        """Entries of decode steps to capture as graphs, ascending."""
        ...

    @property
    def sampler(self) -> HostSampler:
        """Chooses tokens from logits on the host."""
        ...

    def host_logits(self, batch: HostBatch) -> F32:
        """Compute the wanted logits of a pass, [L, V]."""
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
    def matchers(self) -> MakesMatchers:
        """Makes matchers of output against grammars."""
        ...

    @property
    def pools(self) -> Pools:
        """KV pools that slots and pages are of."""
        ...

    @property
    def engine(self) -> StepEngine:
        """Computes the passes."""
        ...


class StepExecutor(Protocol):
    """Computes steps that are checked, one at a time."""

    rows: RowStates[Any]

    def launching(self) -> AbstractContextManager[object]:
        """Return the context in which a step is launched."""
        ...

    def start(self, inits: Sequence[RowInit]) -> None:
        """Start new requests in their rows."""
        ...

    def move_slots(self, row: int, start: int, slots: I32) -> None:
        """Map the row's positions from ``start`` on to ``slots``."""
        ...

    def move_windows(self, pages: I32) -> None:
        """Map pages to window pages: [N, 2]."""
        ...

    def use_weights(self) -> None:
        """Compute common steps with the weights that the engine has now, if it has any."""
        ...

    def run_common(self, step: ForwardStep, done: PassProgress) -> Chosen | None:
        """Compute a step that wants tokens and nothing else; see ``CommonSteps``."""
        ...

    def prepare(self, plan: StepPlan) -> int | None:
        """Bring the step's arrays to where it is computed; return the size of the graph to replay (None: none)."""
        ...

    def compute(self, plan: StepPlan, done: PassProgress, size: int | None) -> Any:
        """Compute the prepared pass, counting layers that are ``done``; return the wanted logits, [L, V].

        ``size``: what ``prepare`` returned.
        """
        ...

    def choose(self, logits_LV: Any, plan: StepPlan, params: RowParams) -> Sampled[Any]:
        """Choose the sampled entries' tokens, which are their rows' last ones from here on."""
        ...

    def score_samples(self, logits_LV: Any, tokens_S: Any, wanted: I64, most: int) -> Scored[Any]:
        """Score the chosen tokens of the ``wanted`` samples."""
        ...

    def score_prompt(self, logits_NV: Any, targets_N: I64, most: int) -> Scored[Any]:
        """Score tokens of a prompt."""
        ...

    def fetch(self, arrays: Sequence[Any]) -> HostCopy:
        """Start copies of the results to the host."""
        ...

    def capture_graphs(self) -> None:
        """Capture the graphs of decode steps, where there are any."""
        ...

    def drop_graphs(self) -> None:
        """Compute without graphs, until they are captured again."""
        ...
