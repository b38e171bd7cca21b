"""Steps of a device that computes beside the host: arrays travel there, and work is queued behind what is queued.

Nothing here waits for the device. Tokens are chosen and counted there (``sampling/device/``), and log-probabilities are
computed with the step. Steps that decode only are graphs where the device has them (``decode_graphs.py``).

Shapes: S sampled entries, L wanted rows of logits, R rows and C columns of the request table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...messages.base import I32
from ...messages.worker import ForwardStep, RowInit
from ...runtime.layers_done import PassProgress
from ..batch.forward_batch import ForwardBatch
from ..batch.scored_logits import SCORES_NOTHING, ScoredLogits, are_many
from ..batch.step_arrays import DeviceArrays, StepArrays
from ..batch.step_plan import StepPlan
from ..batch.tensor_hidden import READS_NOTHING, ReadsHidden, TensorHidden
from ..device.base import Device, HostCopy
from ..kv.pools import Pools
from ..ops.choose import choose_ops
from ..readouts.reader import ReadoutMaker
from ..sampling.device.base import SampledRows, device_rows
from ..sampling.device.choose import choose_sampler
from ..sampling.row_params import I64, RowParams
from ..sampling.rows import RowStates
from ..sampling.sampled import Sampled, Scored
from .common_steps import Chosen
from .decode_graphs import DecodeGraphs, GraphModel


class DeviceEngine(GraphModel, Protocol):
    """What a step on a device needs of ``engines.torch.AttentionEngine``."""

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of entries for which a graph of decode steps is captured, ascending; empty: none."""
        ...

    @property
    def logits_dtype(self) -> torch.dtype:
        """Element type of the logits that ``compute`` returns."""
        ...

    @property
    def scores_later(self) -> bool:
        """Whether ``compute`` hands ``ForwardBatch.scored`` what computes logits after the pass."""
        ...


class DeviceModel(Protocol):
    """A model on a device; see ``Model``."""

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
    def pools(self) -> Pools:
        """KV pools that the steps' slots and pages belong to."""
        ...

    @property
    def engine(self) -> DeviceEngine:
        """Engine that computes the forward passes."""
        ...


class DeviceExecutor:
    """Executor of a device that computes beside the host: each call queues its work there and returns."""

    def __init__(self, model: DeviceModel, max_reqs: int) -> None:
        self._engine, pools = model.engine, model.pools
        self._device = device = model.device
        self._ops = choose_ops(device.torch)
        self.rows: RowStates[Tensor] = device_rows(max_reqs, model.vocab_size, device.torch)
        self.req_to_token = torch.zeros((max_reqs, model.context_length), dtype=torch.int32, device=device.torch)
        """[R, C]"""
        self.window_pages: Tensor | None = None
        """[P] int32: page of the windowed layers' pool for each page; None if no layer has a window.

        Its address stays the same, as graphs read it there.
        """
        if pools.num_window_pages:
            pages = pools.num_slots // pools.page_size
            self.window_pages = torch.zeros(pages, dtype=torch.int32, device=device.torch)
        self._arrays = StepArrays(device, max_reqs)
        self._there: DeviceArrays | None = None
        """Arrays of the step that is being launched."""
        self.graphs = DecodeGraphs(device, self._engine, self._engine.graph_sizes)
        # Graphs read it at every replay, so it is made once and stays.
        self._all_entries = torch.arange(max(self._engine.graph_sizes, default=0), device=device.torch)
        self._readouts = ReadoutMaker(torch.float64, self._score_labels)
        self._no_hidden = self._hidden = TensorHidden(self._all_entries[:0])
        """``_hidden``: hidden states of the pass that was computed last, until they are read out."""
        self._scored: ScoredLogits | None = None
        """Logits of the step's prompt tokens that are computed piece by piece; None: all are there."""
        self.sampler = choose_sampler(device, self.rows, self._engine.logits_dtype)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Enter torch's inference mode, in which waiting for the device raises, if the device can detect that."""
        with torch.inference_mode(), self._device.no_sync():
            yield

    def start(self, inits: Sequence[RowInit]) -> None:
        """Replace the sampling state of each new request's row, on the host and in the device's sampler."""
        for init in inits:
            self.rows.start(init)
        if inits:
            self.sampler.start(inits)

    def move_slots(self, row: int, start: int, slots: I32) -> None:
        """Upload ``slots`` and queue their write into the device's request table.

        They are those of the positions of ``row`` from ``start`` on.
        """
        self.req_to_token[row, start : start + len(slots)] = self._device.upload(slots)

    def move_windows(self, pages: I32) -> None:
        """Upload the pairs (page, window page) and queue their write into ``window_pages``.

        Do nothing if no layer has a window.
        """
        if self.window_pages is not None:
            there = self._device.upload(pages)
            self.window_pages.index_copy_(0, there[:, 0].long(), there[:, 1])

    def use_weights(self) -> None:
        """Do nothing: the engine computes each step with the weights that it has then."""

    def run_common(self, step: ForwardStep, done: PassProgress) -> Chosen | None:
        """Return None for every step: a device computes it part by part, with nothing done here."""
        return None

    def prepare(self, plan: StepPlan) -> int | None:
        """Queue the upload of the plan's arrays, and the writes of its slots and last tokens into the device's arrays.

        Return the number of entries of the decode graph to replay, or None to compute without a graph.
        """
        self._scored = None
        size = self.graphs.size_for(len(plan.rows)) if plan.is_decode else None
        self._there = self._arrays.load(plan, size or 0)
        self._ops.enter(self._there, self.req_to_token, self.rows.last_tokens)
        return size

    def compute(self, plan: StepPlan, done: PassProgress, size: int | None) -> Tensor:
        """Queue the replay of the graph of ``size`` entries, or a pass without a graph if ``size`` is None.

        Return the wanted logits, [L, V]. They are float32 unless the sampler reads 16-bit types. If many prompt tokens
        are scored, their logits are computed later. ``done`` counts the layers that the device has computed; a replay
        counts none.
        """
        return self._as_read(self._forward(plan, done) if size is None else self._replay(plan, size))

    def _forward(self, plan: StepPlan, done: PassProgress) -> Tensor:
        there = self._loaded
        done.mark_by(self._device.mark)
        hidden: ReadsHidden = READS_NOTHING
        if len(plan.hidden_tokens):
            hidden = self._hidden = TensorHidden(self._device.upload(plan.hidden_tokens))
        wanted, samples = there.logit_indices, len(plan.sampled)
        if self._engine.scores_later and are_many(len(wanted) - samples):
            self._scored = ScoredLogits(wanted[samples:])
            wanted = wanted[:samples]
        batch = ForwardBatch(
            input_ids=there.input_ids,
            positions=there.positions,
            out_cache_loc=there.out_cache_loc,
            rows=there.rows,
            starts=plan.starts.tolist(),
            q_lens=plan.q_lens.tolist(),
            req_to_token=self.req_to_token,
            logit_indices=wanted,
            done=done,
            prompt_lens=self.rows.table["prompt_len"][plan.rows].tolist(),
            window_pages=self.window_pages,
            begun_at=there.begun_at,
            host_rows=plan.rows,
            hidden=hidden,
            scored=self._scored or SCORES_NOTHING,
        )
        self._engine.prepare(batch)
        return self._engine.compute(batch)

    def _replay(self, plan: StepPlan, size: int) -> Tensor:
        there, batch = self._loaded, self._padded_batch(size)
        count = len(plan.rows)
        batch.starts[:count] = plan.starts.tolist()
        batch.begun_at = there.begun_at
        batch.host_rows[:count] = plan.rows
        logits_SV = self.graphs.run(batch)
        # As a rule every entry samples, and nothing is copied.
        everyone = len(plan.logit_indices) == count and len(plan.sampled) == count
        return logits_SV[:count] if everyone else logits_SV.index_select(0, there.logit_indices)

    def choose(self, logits_LV: Tensor, plan: StepPlan, params: RowParams) -> Sampled[Tensor]:
        """Queue the device sampler's choice of tokens for the sampled entries.

        The tokens that it returns stay on the device. Queue nothing if no entry samples.
        """
        if not len(params):
            nothing = torch.empty(0, dtype=torch.int64, device=self._device.torch)
            return Sampled(nothing, nothing.bool())
        on_device = self._loaded.sampled_rows, self._loaded.sampled_positions
        sampled = SampledRows(plan.sampled_rows, plan.sampled_positions, params, *on_device)
        return self.sampler.sample(logits_LV[: len(params)], sampled)

    def score_samples(self, logits_LV: Tensor, tokens_S: Tensor, wanted: I64, most: int) -> Scored[Tensor]:
        """Queue the log-probabilities of some sampled tokens, and of each one's ``most`` likeliest alternatives.

        ``tokens_S``: tokens sampled from the first S rows of ``logits_LV``. ``wanted``: indices into ``tokens_S`` of
        those to score. The scores stay on the device.
        """
        logits_NV = logits_LV[: len(tokens_S)]
        if len(wanted) < len(tokens_S):
            at = self._device.upload(wanted)
            logits_NV, tokens_S = logits_NV.index_select(0, at), tokens_S.index_select(0, at)
        return self.sampler.score(logits_NV, tokens_S, most)

    def score_prompt(self, logits_LV: Tensor, first: int, targets_N: I64, most: int) -> Scored[Tensor]:
        """Upload the tokens ``targets_N`` and queue the log-probability of each, by wanted logits from ``first`` on.

        Each comes with the ``most`` likeliest alternatives at its position. The scores stay on the device. Logits that
        the pass did not return are computed now.
        """
        count = len(targets_N)
        if self._scored is None:
            return self.sampler.score(logits_LV[first : first + count], self._device.upload(targets_N), most)
        first -= len(logits_LV)
        parts, begin = [], 0
        for logits_NV in self._scored.pieces(first, first + count):
            end = begin + len(logits_NV)
            # Not a slice of all: Triton compiles a kernel anew for addresses that are no multiples of 16 bytes.
            there = self._device.upload(targets_N[begin:end])
            parts.append(self.sampler.score(self._as_read(logits_NV), there, most))
            begin = end
            # Otherwise the piece would live while the next one is computed.
            del logits_NV
        return Scored(*(torch.cat(arrays) for arrays in zip(*parts, strict=True)))

    def _as_read(self, logits: Tensor) -> Tensor:
        """Return ``logits`` in a type that the sampler reads."""
        return logits if self.sampler.reads_halves else logits.float()

    def read_out(self, step: ForwardStep, plan: StepPlan, logits_LV: Tensor) -> list[Tensor]:
        """Queue the work of the step's readouts, and return the vectors of those that are complete with it.

        The vectors and all sums stay on the device.
        """
        # Not kept until the next pass: a long prompt's states may be hundreds of megabytes.
        self._scored = None
        hidden, self._hidden = self._hidden, self._no_hidden
        return self._readouts.make(step.readouts, plan, hidden.states, logits_LV)

    def _score_labels(self, logits_LV: Tensor, row: int, labels: I64) -> Tensor:
        logits_V = logits_LV[row].float()
        return logits_V.index_select(0, self._device.upload(labels)) - logits_V.logsumexp(0)

    def fetch(self, arrays: Sequence[Tensor]) -> HostCopy:
        """Start copies of ``arrays`` to the host, behind the work queued so far, and return without waiting.

        Steps that are queued later do not delay the copies.
        """
        return self._device.fetch(arrays)

    def capture_graphs(self) -> None:
        """Capture a graph for each of the engine's ``graph_sizes``; do nothing if it has none.

        Raises ``NotEnoughMemory``.
        """
        if self._engine.graph_sizes:
            self._arrays.clear()
            with torch.inference_mode():
                self.graphs.capture(self._padded_batch)

    def drop_graphs(self) -> None:
        """Free the captured graphs. Decode steps queue their kernels one by one until graphs are captured again."""
        self.graphs.drop()

    @property
    def _loaded(self) -> DeviceArrays:
        assert self._there is not None, "a step is prepared first"
        return self._there

    def _padded_batch(self, size: int) -> ForwardBatch:
        """Return a decode step of ``size`` padding entries, over the arrays that the graph of this size reads."""
        there = self._arrays.padded(size)
        return ForwardBatch(
            *there[:4],
            starts=[0] * size,
            q_lens=[1] * size,
            req_to_token=self.req_to_token,
            logit_indices=self._all_entries[:size],
            window_pages=self.window_pages,
            begun_at=there.input_ids[:0],
            host_rows=np.zeros(size, dtype=np.int64),
            is_captured=True,
        )
