"""Whether a step stays within the worker's tables and pool; asked before anything of it is written.

The CPU kernels write where a slot says, without asking again: one slot too far is another process's crash, or someone
else's KV. The scheduler's books are wrong where this raises.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import UnsetType

from ...messages.base import I32, unpack_i32
from ...messages.worker import ForwardStep


class StepLimits(NamedTuple):
    """Limits of a step.

    ``rows`` and ``columns``: size of the request table. ``slots``: of the pool, page 0 included. ``pages``: of the
    pool. ``window_pages``: pages of the pool of windowed layers, or 0 without such layers.
    """

    rows: int
    columns: int
    slots: int
    pages: int = 0
    window_pages: int = 0


def check_changes(step: ForwardStep, limits: StepLimits) -> None:
    """Check a step's new rows, moved slots and window pages against ``limits``, before they are applied.

    Raises ``IndexError``.
    """
    for init in step.new_rows:
        if not 0 <= init.row < limits.rows:
            raise IndexError(f"step {step.step_id}: row {init.row} begins, there are {limits.rows}")
    for delta in step.slot_deltas:
        slots = unpack_i32(delta.slots)
        if not (0 <= delta.row < limits.rows and 0 <= delta.start <= limits.columns - len(slots)):
            raise IndexError(f"step {step.step_id}: positions {delta.start} + {len(slots)} of row {delta.row} moved")
        _check_range(slots, limits.slots, f"step {step.step_id}: slots that moved")
    if not isinstance(step.window_pages, UnsetType):
        pages, window_pages = unpack_i32(step.window_pages).reshape(-1, 2).T
        _check_range(pages, limits.pages, f"step {step.step_id}: pages of tokens")
        _check_range(window_pages, limits.window_pages, f"step {step.step_id}: window pages")


def check_entries(step: ForwardStep, limits: StepLimits) -> None:
    """Check the rows, positions and slots of a step's pass against ``limits``, before anything is written.

    Raises ``IndexError``, and ``ValueError`` for arrays with lengths that don't fit together.
    """
    rows, starts, q_lens = unpack_i32(step.rows), unpack_i32(step.starts), unpack_i32(step.q_lens)
    if not len(rows) == len(starts) == len(q_lens) == len(step.use_last) // 4 == len(step.sample) // 4:
        raise ValueError(f"step {step.step_id}: {len(rows)} rows, {len(starts)} starts, {len(q_lens)} lengths")
    if len(q_lens) and int(q_lens.min()) < 1:
        raise ValueError(f"step {step.step_id}: an entry of {q_lens.min()} tokens")
    tokens, ids, slots = int(q_lens.sum(dtype=np.int64)), unpack_i32(step.input_ids), unpack_i32(step.out_cache_loc)
    if not len(ids) == len(slots) == tokens:
        raise ValueError(f"step {step.step_id}: {tokens} tokens, {len(ids)} ids, {len(slots)} slots")
    _check_range(rows, limits.rows, f"step {step.step_id}: rows")
    _check_range(starts, limits.columns, f"step {step.step_id}: starts")
    _check_range(starts + q_lens.astype(np.int64) - 1, limits.columns, f"step {step.step_id}: positions")
    _check_range(slots, limits.slots, f"step {step.step_id}: slots")


def _check_range(values: I32 | np.ndarray[tuple[int, ...], np.dtype[np.int64]], end: int, what: str) -> None:
    if len(values) and not 0 <= values.min() <= values.max() < end:
        raise IndexError(f"{what} reach from {values.min()} to {values.max()}, there are {end}")
