"""A step's rows as the attention kernels read them, computed on the device without a copy or a wait.

    kv_lens, kv_indptr, splits ◀── plan_rows ── positions of the rows' last tokens
    kv_indices                 ◀── fill_kv_indices ── request table

Both are kernels of fixed grids over buffers with fixed addresses. So a captured graph may contain the plan, or only
what reads it. The arrays are those of ``step_plan.paged_indices`` and ``kv_indices``, made where they are needed.

Letters: T tokens of the pass, B entries, W windows (of layers; 0: none), R rows and C columns of the request table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FILLING_PROGRAMS = 8
"""Programs that fill in the pages of one entry; 8192 pages (128 Ki tokens of 16) take 8 turns of each."""
PAGES_AT_ONCE = 128


@triton.jit(do_not_specialize=["num_entries", "capacity"])
def plan_rows(
    tokens: tl.tensor,
    positions: tl.tensor,
    windows: tl.tensor,
    kv_lens: tl.tensor,
    kv_indptr: tl.tensor,
    split_indptr: tl.tensor,
    split_sizes: tl.tensor,
    num_entries: int,
    capacity: int,
    PAGE_SIZE: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    """Compute how each entry's KV is cut into splits for the layers with window number ``program_id(0)``.

    Writes that row of ``split_sizes`` [W, capacity], the tokens of each entry's splits, and of ``split_indptr`` [W,
    capacity + 1], where its splits begin. The first program also writes ``kv_lens`` and ``kv_indptr``, which all
    windows share. ``tokens`` [B]: index of each entry's last token in the pass. ``positions``: of all the pass's
    tokens. ``windows`` [W]: 0 for layers without a window.
    """
    entries = tl.arange(0, ENTRIES)
    is_entry = entries < num_entries
    token = tl.load(tokens + entries, mask=is_entry, other=0)
    kv_len = tl.load(positions + token, mask=is_entry, other=-1).to(tl.int32) + 1
    window = tl.load(windows + tl.program_id(0))
    seen = tl.where(window > 0, tl.minimum(kv_len, window), kv_len)
    size = tl.full([ENTRIES], LEAST_SPLIT, tl.int32)
    for _ in tl.static_range(DOUBLINGS):
        size = tl.where((seen + size - 1) // size > MOST_SPLITS, size * 2, size)
    ends = tl.cumsum((seen + size - 1) // size, 0)
    tl.store(split_sizes + tl.program_id(0) * capacity + entries, size, mask=is_entry)
    indptr = split_indptr + tl.program_id(0) * (capacity + 1)
    tl.store(indptr + 1 + entries, ends, mask=is_entry)
    tl.store(indptr, 0)
    if tl.program_id(0) == 0:
        tl.store(kv_lens + entries, kv_len, mask=is_entry)
        tl.store(kv_indptr + 1 + entries, tl.cumsum((kv_len + PAGE_SIZE - 1) // PAGE_SIZE, 0), mask=is_entry)
        tl.store(kv_indptr, 0)


@triton.jit
def fill_kv_indices(
    req_to_token: tl.tensor,
    rows: tl.tensor,
    entries: tl.tensor,
    window_pages: tl.tensor,
    kv_lens: tl.tensor,
    kv_indptr: tl.tensor,
    kv_indices: tl.tensor,
    window_indices: tl.tensor,
    row_stride: int,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the page numbers of planned entry ``program_id(0)`` to ``kv_indices``, from the request table.

    ``entries``: index of each planned entry in the batch, and so in ``rows``, its row of the table. Programs along axis
    1 share its pages. ``window_pages``: the window pool's page for each page, or 0. With it, ``window_indices`` gets
    the entry's pages in that pool; those before a window are arbitrary.
    """
    entry = tl.program_id(0)
    row = tl.load(rows + tl.load(entries + entry)).to(tl.int64)
    num_pages = (tl.load(kv_lens + entry) + PAGE_SIZE - 1) // PAGE_SIZE
    first = tl.load(kv_indptr + entry)
    for begin in range(tl.program_id(1) * BLOCK, num_pages, tl.num_programs(1) * BLOCK):
        ordinals = begin + tl.arange(0, BLOCK)
        mask = ordinals < num_pages
        slots = tl.load(req_to_token + row * row_stride + ordinals.to(tl.int64) * PAGE_SIZE, mask=mask, other=0)
        pages = slots // PAGE_SIZE
        tl.store(kv_indices + first + ordinals, pages, mask=mask)
        if HAS_WINDOW_PAGES:
            windowed = tl.load(window_pages + pages, mask=mask, other=0)
            tl.store(window_indices + first + ordinals, windowed, mask=mask)


class RowArrays(NamedTuple):
    """Room for ``capacity`` entries and ``pages`` of theirs. int32; see ``plan_rows`` and ``fill_kv_indices``.

    ``window_indices`` is ``kv_indices`` once more where no layers have pages of their own.
    """

    windows: Tensor
    kv_lens: Tensor
    kv_indptr: Tensor
    split_indptr: Tensor
    split_sizes: Tensor
    kv_indices: Tensor
    window_indices: Tensor

    @property
    def by_group(self) -> tuple[Tensor, Tensor]:
        """Arrays of the entries' page numbers: in the full pool, and in the window pool."""
        return self.kv_indices, self.window_indices

    @property
    def capacity(self) -> int:
        """Maximum number of entries."""
        return len(self.kv_lens)

    @classmethod
    def make(cls, capacity: int, pages: int, windows: Tensor, has_window_pages: bool) -> RowArrays:
        """Make zeroed arrays for up to ``capacity`` entries with ``pages`` pages in all, on the device of ``windows``.

        ``windows`` ([W] int32): each window that layers have, 0 for layers without. ``has_window_pages``: whether
        windowed layers have a pool of their own; if not, both arrays of page numbers are the same tensor.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=windows.device)

        kv_indices = zeros(pages)
        return cls(
            windows=windows,
            kv_lens=zeros(capacity),
            kv_indptr=zeros(capacity + 1),
            split_indptr=zeros(len(windows), capacity + 1),
            split_sizes=zeros(len(windows), capacity),
            kv_indices=kv_indices,
            window_indices=zeros(pages) if has_window_pages else kv_indices,
        )


class PlannedRows(NamedTuple):
    """Entries of a pass that are attended alike.

    int32 [B]: ``entries``, their numbers in the batch, and ``last_tokens``, the positions of their last tokens in the
    pass.
    """

    entries: Tensor
    last_tokens: Tensor


class TableOfPass(NamedTuple):
    """What a plan reads of a ``ForwardBatch``."""

    positions: Tensor
    rows: Tensor
    req_to_token: Tensor
    window_pages: Tensor | None


def fill_rows(
    arrays: RowArrays, planned: PlannedRows, table: TableOfPass, page_size: int, least_split: int, most_splits: int
) -> None:
    """Queue kernels that fill ``arrays`` with the KV lengths, page numbers and splits of the ``planned`` entries.

    ``least_split``: tokens of the smallest split. A split is doubled while an entry would have more than
    ``most_splits``.
    """
    batch = len(planned.entries)
    plan_rows[(len(arrays.windows),)](
        planned.last_tokens,
        table.positions,
        arrays.windows,
        arrays.kv_lens,
        arrays.kv_indptr,
        arrays.split_indptr,
        arrays.split_sizes,
        batch,
        arrays.capacity,
        PAGE_SIZE=page_size,
        LEAST_SPLIT=least_split,
        MOST_SPLITS=most_splits,
        DOUBLINGS=max(1, (table.req_to_token.shape[1] // (least_split * most_splits)).bit_length()),
        ENTRIES=triton.next_power_of_2(arrays.capacity),
    )
    window_pages = table.window_pages
    fill_kv_indices[(batch, FILLING_PROGRAMS)](
        table.req_to_token,
        table.rows,
        planned.entries,
        arrays.kv_indices if window_pages is None else window_pages,
        arrays.kv_lens,
        arrays.kv_indptr,
        arrays.kv_indices,
        arrays.window_indices,
        table.req_to_token.stride(0),
        PAGE_SIZE=page_size,
        HAS_WINDOW_PAGES=window_pages is not None,
        BLOCK=PAGES_AT_ONCE,
    )
