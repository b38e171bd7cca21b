"""The attention backend of our own Triton kernels; in Triton's interpreter it runs, slowly, on a CPU.

A pass's entries part in two: those of one token (decode steps, in the main) go to ``paged_decode.py``, longer ones to
``paged_prefill.py``. ``plan`` leaves their rows' pages on the device (``attention_plan.py``) and the slots that the
pass writes; ``forward`` stores, then attends.

A pass of decodes alone can be captured, with its plan or without. Its arrays have fixed addresses, its grids depend on
the number of entries only, and it reads nothing back from the device. Passes of more entries than there is room for,
and longer chunks, have arrays that grow. They are not to be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from ....model_files.spec import AttentionSpec, MLASpec
from ...batch.forward_batch import ForwardBatch
from ...kv.pool import KVPool
from ..base import AttentionBackend, AttentionLimits
from ..group_pools import group_pools, groups_of_layers
from .attention_plan import PlannedRows, RowArrays, TableOfPass, fill_rows
from .paged_decode import AttentionTerms, DecodeRows, Partials, Splits, paged_decode
from .paged_prefill import ExtendRows, prefill
from .pool_views import LayerViews, layer_views
from .store_kv import store_kv
from .tiles import (
    MOST_SPLITS,
    DecodeTiles,
    PrefillTiles,
    TileShape,
    decode_tiles,
    most_splits,
    prefill_tile_list,
    prefill_tiles,
)

INTERPRETED_PROGRAMS = 2
"""Where programs run one after another, more of them only cost more."""
ALIGNED = 4
"""Elements of int32 in 16 bytes."""
INTERPRETED_CAPABILITY = 90
"""Compute capability with the tiles that the interpreter takes."""


class _DecodeRoom(NamedTuple):
    """Arrays for entries of one token, and for the sums of their splits."""

    rows: RowArrays
    partials: Partials
    entries: Tensor
    """0, 1, 2, …: all of a pass."""
    slots: list[Tensor]
    """int64, for each page group: what such a pass writes."""


class _Extends(NamedTuple):
    """Planned entries of several tokens."""

    arrays: RowArrays
    first_tokens: Tensor
    q_lens: Tensor
    tile_list: Tensor


class TritonAttention(AttentionBackend):
    """Attention by our own Triton kernels, for decode steps, prefill chunks and any mix of them."""

    is_graph_safe: ClassVar[bool] = True
    reads_whole_pages: ClassVar[bool] = False

    def __init__(
        self,
        pools: Sequence[KVPool],
        dtype: torch.dtype,
        limits: AttentionLimits,
        tiles: tuple[DecodeTiles, PrefillTiles] | None = None,
    ) -> None:
        """Prepare the kernels over ``pools``, one for each page group, and allocate the arrays for ``limits``.

        ``dtype``: type of the queries. ``tiles`` replaces the choice of ``tiles.py`` for this GPU. Raises
        ``ValueError`` if the kernels can't read the pools.
        """
        self._groups, self._group_of = group_pools(pools), groups_of_layers(pools)
        self._layers = {layer: views for pool in pools for layer, views in layer_views(pool).items()}
        self._page_size = pools[0].layout.page_size
        self._device = pools[0].data.device
        self._limits = limits
        self._windows = tuple(sorted({0, *limits.windows}))
        self._windows_there = torch.tensor(self._windows, dtype=torch.int32).to(self._device)
        views = next(iter(self._layers.values()))
        self._value_dim = views.value_dim
        kept = views.keys.itemsize
        shape = TileShape(views.head_dim, views.value_dim, limits.heads // views.heads, kept, dtype.itemsize)
        capability, processors = _device_of(self._device)
        if tiles is None:
            tiles = decode_tiles(shape, capability), prefill_tiles(shape, capability)
        self._decode_tiles, self._prefill_tiles = tiles
        self._programs = processors * self._decode_tiles.programs
        self._parts = views.heads * triton.cdiv(shape.group, self._decode_tiles.block_h)
        self._queries = max(1, self._prefill_tiles.block_m // shape.group)
        self._fixed = self._grown = self._make_room(limits.max_entries)
        # The number of entries that arrays have room for is a constant of kernels: it must not grow from step to step.
        self._extend_arrays = self._make_arrays(limits.max_entries, 1)
        self._decodes: tuple[_DecodeRoom, PlannedRows] | None = None
        self._extends: _Extends | None = None
        self._slots = self._fixed.slots

    def plan(self, batch: ForwardBatch) -> None:
        """Queue the kernels that find each entry's pages on the device: one-token entries apart from longer ones.

        Passes of decodes alone use arrays at fixed addresses, up to ``max_entries`` of ``AttentionLimits``.
        """
        short = [b for b, q_len in enumerate(batch.q_lens) if q_len == 1]
        is_decode = len(short) == len(batch.q_lens)
        room = self._room_for(len(short))
        self._plan_slots(batch, room if is_decode else None)
        table = TableOfPass(batch.positions, batch.rows, batch.req_to_token, batch.window_pages)
        self._decodes = self._extends = None
        if is_decode:
            whole = room.entries[: len(short)]
            self._decodes = room, PlannedRows(whole, whole)
            self._fill(room.rows, self._decodes[1], table)
            return
        q_lens, starts = np.array(batch.q_lens), np.array(batch.starts)
        ends = np.cumsum(q_lens)
        if short:
            entries = np.array(short)
            self._decodes = room, PlannedRows(*self._send(entries, ends[entries] - 1))
            self._fill(room.rows, self._decodes[1], table)
        self._plan_extends(q_lens, starts, ends, table)

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec | MLASpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Queue writing ``k`` and ``v`` into the pool, and the decode and prefill kernels; return their attention."""
        pool, group = self._layers[layer], self._group_of[layer]
        store_kv(k, v, self._slots[group], pool)
        if q.stride(-1) != 1:
            q = q.contiguous()
        out_THV = torch.empty((*q.shape[:2], self._value_dim), dtype=q.dtype, device=q.device)
        attention = _attention(spec, sinks)
        if self._decodes is not None:
            self._decode(q, out_THV, pool, group, attention)
        if self._extends is not None:
            arrays, first_tokens, q_lens, tile_list = self._extends
            pages = arrays.by_group[group]
            rows = ExtendRows(first_tokens, q_lens, arrays.kv_lens, arrays.kv_indptr, pages)
            prefill(q, out_THV, pool, rows, tile_list, attention, self._prefill_tiles)
        return out_THV.flatten(1)

    def _decode(self, q_THD: Tensor, out_THV: Tensor, pool: LayerViews, group: int, attention: AttentionTerms) -> None:
        assert self._decodes is not None
        (arrays, partials, *_), planned = self._decodes
        batch = len(planned.entries)
        pages = arrays.by_group[group]
        rows = DecodeRows(
            planned.last_tokens,
            arrays.kv_lens[:batch],
            arrays.kv_indptr,
            pages,
            triton.next_power_of_2(arrays.capacity),
        )
        which = self._windows.index(attention.window)
        splits = Splits(arrays.split_indptr[which], arrays.split_sizes[which])
        most = batch * most_splits(self._limits.context_length, self._decode_tiles.least_split) * self._parts
        programs = min(most, self._programs)
        paged_decode(q_THD, out_THV, pool, rows, splits, partials, attention, self._decode_tiles, programs)

    def _plan_extends(
        self,
        q_lens: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        table: TableOfPass,
    ) -> None:
        entries = np.flatnonzero(q_lens > 1)
        lens, kv_lens, lasts = q_lens[entries], (starts + q_lens)[entries], ends[entries] - 1
        pages = int((-(-kv_lens // self._page_size)).sum())
        arrays = self._extend_arrays
        if arrays.capacity < len(entries) or len(arrays.kv_indices) < pages:
            capacity = triton.next_power_of_2(max(arrays.capacity, len(entries)))
            # As in ``step_arrays.py``: the size depends on the longest step alone, and the old ones go first.
            del arrays, self._extend_arrays
            arrays = self._extend_arrays = self._make_arrays(capacity, triton.next_power_of_2(pages))
        tile_list = prefill_tile_list(lens, kv_lens, self._queries)
        whole, last_tokens, firsts, lengths, tiles = self._send(entries, lasts, lasts + 1 - lens, lens, tile_list)
        self._fill(arrays, PlannedRows(whole, last_tokens), table)
        self._extends = _Extends(arrays, firsts, lengths, tiles.view(-1, 2))

    def _plan_slots(self, batch: ForwardBatch, room: _DecodeRoom | None) -> None:
        """Find the slots that the pass writes, in each page group's pool, and keep them for ``forward``.

        ``room``: decode arrays at fixed addresses, which a captured graph reads; the slots are copied there. None: the
        slots are used where they are.
        """
        self._slots = [group.slots(batch) for group in self._groups]
        if room is not None:
            pairs = zip(room.slots, self._slots, strict=True)
            self._slots = [there[: len(slots)].copy_(slots) for there, slots in pairs]

    def _fill(self, arrays: RowArrays, planned: PlannedRows, table: TableOfPass) -> None:
        fill_rows(arrays, planned, table, self._page_size, self._decode_tiles.least_split, MOST_SPLITS)

    def _send(self, *arrays: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> list[Tensor]:
        """Queue a copy of the arrays to the device, in one piece, and return them there as int32.

        Each array begins at a multiple of 16 bytes: Triton compiles a kernel anew for addresses that do not.
        """
        begins = np.cumsum([0, *(-(-array.size // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        packed = np.zeros(begins[-1], dtype=np.int32)
        for begin, array in zip(begins, arrays, strict=False):
            packed[begin : begin + array.size] = array.reshape(-1)
        host = torch.from_numpy(packed)
        if self._device.type == "cuda":
            # Its pinned memory is not handed out again before the copy has been made.
            host = host.pin_memory()
        there = host.to(self._device, non_blocking=True)
        return [there[begin : begin + array.size] for begin, array in zip(begins, arrays, strict=False)]

    def _room_for(self, entries: int) -> _DecodeRoom:
        if entries <= self._limits.max_entries:
            return self._fixed
        if entries > self._grown.rows.capacity:
            self._grown = self._make_room(triton.next_power_of_2(entries))
        return self._grown

    def _make_room(self, entries: int) -> _DecodeRoom:
        limits = self._limits
        splits = entries * most_splits(limits.context_length, self._decode_tiles.least_split)
        return _DecodeRoom(
            rows=self._make_arrays(entries, entries * -(-limits.context_length // self._page_size)),
            partials=Partials.make(splits, limits.heads, self._value_dim, self._device),
            entries=torch.arange(entries, dtype=torch.int32, device=self._device),
            slots=[torch.zeros(entries, dtype=torch.int64, device=self._device) for _ in self._groups],
        )

    def _make_arrays(self, capacity: int, pages: int) -> RowArrays:
        return RowArrays.make(capacity, pages, self._windows_there, len(self._groups) > 1)


def _device_of(device: torch.device) -> tuple[int, int]:
    """Return the GPU's compute capability (times ten) and its number of multiprocessors.

    On a CPU they are what the interpreter assumes.
    """
    if device.type != "cuda":
        return INTERPRETED_CAPABILITY, INTERPRETED_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def _attention(spec: AttentionSpec | MLASpec, sinks: Tensor | None) -> AttentionTerms:
    if isinstance(spec, MLASpec):
        return AttentionTerms(spec.scale, 0, 0.0, None)
    return AttentionTerms(spec.scale, spec.window or 0, spec.softcap or 0.0, sinks)
