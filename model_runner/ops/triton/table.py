"""Changes of a step on the device before its pass, in one launch: slots, pages of windowed layers, last tokens.

The changes are a list of single entries (``TableWrites``), collected on the host in the order of ``ForwardStep``. A
later write to an entry replaces earlier ones there, because programs write in no order.

Shapes: W writes, P pairs of pages, U tokens that are their rows' last ones, R rows and C columns of the request table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from ....messages.base import unpack_i32
from ....messages.worker import SlotDelta
from ...batch.step_plan import I64

_BLOCK = 256


class TableWrites(NamedTuple):
    """Position ``positions[i]`` of row ``rows[i]`` lives in ``slots[i]`` from now on: [W] each, a place once."""

    rows: I64
    positions: I64
    slots: I64


def plan_writes(deltas: Sequence[SlotDelta], rows: I64, positions: I64, slots: I64, columns: int) -> TableWrites:
    """Return all writes of a step into the request table: those of ``deltas`` in order, then the pass's own.

    ``rows``, ``positions``, ``slots`` ([T] each): the pass's own writes. Of several writes to one entry of the table,
    only the last is returned. ``columns``: columns of the request table.
    """
    if not deltas:
        return TableWrites(rows, positions, slots)
    moved = [unpack_i32(delta.slots).astype(np.int64) for delta in deltas]
    sizes = [len(part) for part in moved]
    all_rows = np.concatenate((np.repeat([delta.row for delta in deltas], sizes), rows))
    places = [np.arange(delta.start, delta.start + size) for delta, size in zip(deltas, sizes, strict=True)]
    all_positions, all_slots = np.concatenate((*places, positions)), np.concatenate((*moved, slots))
    # The last of each place: the first one, seen from behind.
    flat = (all_rows * columns + all_positions)[::-1]
    kept = len(flat) - 1 - np.unique(flat, return_index=True)[1]
    return TableWrites(all_rows[kept], all_positions[kept], all_slots[kept])


def apply_step(
    req_to_token: Tensor,
    rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    input_ids: Tensor,
    last_tokens: Tensor,
    last_at: Tensor,
    last_rows: Tensor,
    window_pages: Tensor | None = None,
    pages: Tensor | None = None,
) -> None:
    """Queue one kernel that writes ``slots`` ([W] int64) into the request table ``req_to_token`` ([R, C] int32).

    They go to the entries at ``rows`` and ``positions`` ([W] int64). It also makes other changes of the step:
    - ``input_ids[last_at[i]]`` becomes ``last_tokens[last_rows[i]]``, the newest token of that row of the table.
      ``last_at`` and ``last_rows``: [U] int64.
    - ``window_pages`` (int32) maps a page to its page in the window pool. It gets the pairs ``pages`` ([P, 2] int32).

    Entries with row -1 are skipped: they fill up the arrays of a captured graph.
    """
    pairs = 0 if pages is None or window_pages is None else len(pages)
    size = max(len(rows), len(last_at), pairs)
    if size:
        _apply_step[(triton.cdiv(size, _BLOCK),)](
            req_to_token,
            req_to_token.stride(0),
            rows,
            positions,
            slots,
            len(rows),
            input_ids,
            last_tokens,
            last_at,
            last_rows,
            len(last_at),
            window_pages,
            pages,
            pairs,
            WINDOWS=pairs > 0,
            BLOCK=_BLOCK,
        )


@triton.jit(do_not_specialize=["num_writes", "num_last", "num_pairs"])
def _apply_step(
    table_ptr: tl.tensor,
    columns: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_writes: tl.tensor,
    input_ids_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    last_at_ptr: tl.tensor,
    last_rows_ptr: tl.tensor,
    num_last: tl.tensor,
    window_pages_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    num_pairs: tl.tensor,
    WINDOWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + at, mask=at < num_writes, other=-1)
    position = tl.load(positions_ptr + at, mask=row >= 0, other=0)
    slot = tl.load(slots_ptr + at, mask=row >= 0, other=0)
    tl.store(table_ptr + row * columns + position, slot.to(tl.int32), mask=row >= 0)
    last_row = tl.load(last_rows_ptr + at, mask=at < num_last, other=-1)
    place = tl.load(last_at_ptr + at, mask=last_row >= 0, other=0)
    token = tl.load(last_tokens_ptr + last_row, mask=last_row >= 0, other=0)
    tl.store(input_ids_ptr + place, token, mask=last_row >= 0)
    if WINDOWS:
        is_pair = at < num_pairs
        page = tl.load(pages_ptr + 2 * at, mask=is_pair, other=0)
        tl.store(window_pages_ptr + page, tl.load(pages_ptr + 2 * at + 1, mask=is_pair, other=0), mask=is_pair)
