"""The pages that entries read, fetched from the request table on its device.

Shapes: B entries, N pages of all entries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kv_indices(req_to_token: Tensor, rows: Tensor, kv_indptr: Tensor, num_pages: int, page_size: int) -> Tensor:
    """Return the page numbers of all entries' KV, entry after entry, read from the request table: [N] int32.

    ``rows`` ([B] int64) and ``kv_indptr`` ([B + 1], where each entry's pages begin) lie on the table's device.
    ``num_pages``: N. Nothing waits.
    """
    starts = kv_indptr.long()
    entries = torch.arange(len(rows), device=rows.device)
    entry_of_N = torch.repeat_interleave(entries, starts.diff(), output_size=num_pages)
    ordinals_N = torch.arange(num_pages, device=rows.device) - starts.index_select(0, entry_of_N)
    return req_to_token[rows.index_select(0, entry_of_N), ordinals_N * page_size] // page_size
