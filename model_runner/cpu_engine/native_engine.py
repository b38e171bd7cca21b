"""The compiled engine: a model's operations and weights in, whole passes out.

Life: made -> every weight set -> any number of passes, one at a time. Weights are packed already
(``weight_packer.py``), and the caller keeps their memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import c_int64
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..batch.host_batch import HostBatch
from ..dtypes import DType, dtype_name
from .library import NATIVE_DTYPES, ActivationDType, load_library
from .lowering import lower
from .no_exchange import NoExchange
from .pool_view import KernelPool, pass_entries, pool_view
from .ranks import NativeRanks
from .rope_tables import RopeTables
from .structs import ForwardArgs, WeightPart
from .team import Team
from .wanted_tokens import places_of, wanted_tokens
from .weight_packer import LinearKind, LinearPlace


class NormKind(IntEnum):
    """``NormKind`` of engine.h."""

    BEFORE_ATTENTION = 0
    AFTER_ATTENTION = 1
    BEFORE_MLP = 2
    AFTER_MLP = 3
    Q = 4
    K = 5
    FINAL = 6


class VectorKind(IntEnum):
    """``VectorKind`` of engine.h."""

    SINKS = 0
    CHOICE_BIAS = 1


class Ranks(NamedTuple):
    """The part of a model that a tensor-parallel rank computes, and what it shares with the others."""

    shard: Shard | None
    """Part of the model; None: all of it."""
    group: NativeRanks | NoExchange


WHOLE = Ranks(None, NoExchange())
"""The only rank of a whole model."""


def _check_range(what: str, values: npt.NDArray[np.int64], end: int) -> None:
    """Raise ``IndexError`` for values outside ``[0, end)``, with which the kernels would access memory beyond theirs.

    ``what``: name of the values for the message.
    """
    if values.size and not 0 <= values.min() <= values.max() < end:
        raise IndexError(f"{what} reach from {values.min()} to {values.max()}, and end before {end}")


class NativeEngine:
    """Computes passes of the model ``spec``, which ``refusal`` lets pass, over ``pools``, on activations of ``dtype``.

    Raises ``BuildError`` where the kernels can't be had.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: DType,
        ropes: RopeTables,
        pools: Sequence[KernelPool],
        team: Team,
        ranks: Ranks = WHOLE,
        activations: ActivationDType = ActivationDType.INT16,
    ) -> None:
        """Prepare an engine that computes the part of ``spec`` that this rank has.

        ``pools``: one for each page group. ``ranks``: this rank's part, and its exchange with the other tensor-parallel
        ranks; ``spec`` and ``pools`` are this rank's part. ``activations``: the type that activations are rounded to if
        weights are quantised. Raises ``BuildError`` or ``MemoryError``.
        """
        self._library = load_library()
        self._ranks, self._pools = ranks, pools  # the library keeps their addresses
        self._vocab_size, self._hidden_size = spec.vocab_size, spec.hidden_size
        self.ropes, self.team = ropes, team
        self.num_slots = pools[0].num_pages * pools[0].layout.page_size
        """Slots of the pool that the request table leads to, page 0 included."""
        shard = ranks.shard
        name = dtype_name(dtype)
        lowered = lower(spec, name, None if shard is None else shard.vocab, activations)
        for number, of_group in enumerate(pools):
            for place, layer in enumerate(of_group.group.layers):
                lowered.layers[layer].attend.group, lowered.layers[layer].attend.place = number, place
        heads = spec.layers[0].attention.heads
        # Null stands for the window pool of a model without one.
        view, window_view, *_ = [*(pool_view(pool, heads) for pool in pools), None]
        group = ranks.group.handle
        handle = self._library.pds_engine_new(
            lowered.model, lowered.layers, view, window_view, NATIVE_DTYPES[name], team.handle, group
        )
        if handle is None:
            raise MemoryError("no memory for the engine's activations")
        self.handle = handle
        self.most_tokens = ranks.group.most_tokens
        """Maximum tokens of a pass; None: any number."""
        self.shares_heads = shard is not None and shard.shares_kv_heads
        """Whether other ranks write the same keys and values."""
        self.close = weakref.finalize(self, self._library.pds_engine_free, handle)

    def forward(self, batch: HostBatch) -> npt.NDArray[np.float32]:
        """Compute a whole pass: write its KV to the pool, and return the logits at ``batch.logit_indices``, [L, V].

        Also set the states of ``batch.hidden``.
        Raises ``IndexError`` for a token outside the vocabulary and for an index outside the pool or the request table.
        Raises ``MemoryError`` for too long a pass.
        """
        ids, positions = batch.input_ids, batch.positions
        rows, columns = batch.req_to_token.shape
        _check_range("token ids", ids, self._vocab_size)
        _check_range("slots", batch.out_cache_loc, self.num_slots)
        _check_range("positions", positions, columns)
        _check_range("rows", batch.rows, rows)
        _check_range("logit indices", batch.logit_indices, len(ids))
        _check_range("tokens with wanted states", batch.hidden.tokens, len(ids))
        self.check_size(len(ids))
        self.ropes.check(int(positions.max()) + 1)
        entries = pass_entries(batch.rows, batch.starts, batch.q_lens)
        scored, table = len(batch.logit_indices), batch.req_to_token
        wanted = wanted_tokens(batch)
        logits = np.empty((scored, self._vocab_size), dtype=np.float32)
        # [wanted, N], or nothing if no states are wanted.
        states = np.empty((len(wanted) if len(batch.hidden.tokens) else 0, self._hidden_size), dtype=np.float32)
        args = ForwardArgs(
            len(ids),
            len(entries),
            len(wanted),
            scored,
            ids.ctypes.data,
            batch.positions.ctypes.data,
            batch.out_cache_loc.ctypes.data,
            wanted.ctypes.data,
            entries.ctypes.data,
            table.ctypes.data,
            table.strides[0] // table.itemsize,
            None if batch.window_pages is None else batch.window_pages.ctypes.data,
            self.ropes.tables,
            logits.ctypes.data,
            states.ctypes.data if len(states) else None,
            batch.done.address,
        )
        self.team.begin_pass()
        if self._library.pds_engine_forward(self.handle, args) != 0:
            raise MemoryError(f"no memory for a pass of {len(ids)} tokens")
        if len(states):
            batch.hidden.states = states[places_of(batch.hidden.tokens, wanted)]
        return logits

    def check_size(self, tokens: int) -> None:
        """Raise ``MemoryError`` if a pass of ``tokens`` tokens exceeds the ranks' shared memory.

        An engine without other ranks has no limit.
        """
        if self.most_tokens is not None and tokens > self.most_tokens:
            raise MemoryError(f"a pass of {tokens} tokens, the ranks have room for {self.most_tokens}")

    def meet(self) -> None:
        """Wait until all tensor-parallel ranks of this host have called this."""
        self._library.pds_engine_meet(self.handle)

    def weight_bytes_read(self) -> dict[LinearKind, int]:
        """Return how many bytes of weights all threads together read in the last pass, by kind of linear layer."""
        counted = (c_int64 * len(LinearKind))()
        self._library.pds_engine_weight_bytes(self.handle, counted)
        return {kind: counted[kind] for kind in LinearKind}

    def set_linear(self, place: LinearPlace, parts: Sequence[WeightPart], panels: int, bias: int | None) -> None:
        """Use the packed weight at the address ``panels``, and its bias at ``bias``, for the layer at ``place``.

        ``bias``: None if there is none. The engine copies nothing: the caller keeps their memory. ``parts``: the
        weights that are stacked in it; their rows and formats count here, not their data. Raises ``ValueError`` if they
        can't lie side by side in panels, and ``MemoryError``.
        """
        described = (self.handle, *place, len(parts), (WeightPart * len(parts))(*parts))
        answer = self._library.pds_engine_set_linear(*described, panels, bias)
        if answer < 0:
            raise MemoryError("no memory for the description of the weights")
        if answer > 0:
            raise ValueError(f"the parts of {place} can't lie side by side in panels")

    def set_norm(self, kind: NormKind, layer: int, weight: int) -> None:
        """Use the float32 factors at the address ``weight`` for a norm; the final norm's layer is 0.

        Whatever a family adds to its weights is added already. The caller keeps the memory.
        """
        self._library.pds_engine_set_norm(self.handle, kind, layer, weight)

    def set_vector(self, kind: VectorKind, layer: int, values: int) -> None:
        """Use the float32 vector at the address ``values`` in ``layer``.

        It has the logits of attention sinks, [H] of this rank, or what is added to scores for the choice of experts,
        [E]. The caller keeps the memory.
        """
        self._library.pds_engine_set_vector(self.handle, kind, layer, values)

    def set_embedding(self, table: int | None) -> None:
        """Use the table of embeddings at the address ``table``: [V, N] in the engine's own type. The caller keeps it.

        None: the head, which is dense and has all rows, is the table as well.
        """
        self._library.pds_engine_set_embedding(self.handle, table)
