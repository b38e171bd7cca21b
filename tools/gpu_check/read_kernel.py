"""Reads memory and writes next to nothing: the rate at which a device reads, for ``gpu-check``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_BLOCKS = 16
"""Blocks that one program reads."""


def read_all(data: Tensor, out: Tensor) -> None:
    """Read ``data`` ([N] int32, N a multiple of 4096) once, to time it.

    A result is written to ``out`` ([1] int32), so that no compiler can leave the reading out.
    """
    count = data.numel()
    if data.dtype != torch.int32 or count % _BLOCK:
        raise ValueError(f"{count} numbers of {data.dtype}: not int32 in blocks of {_BLOCK}")
    _read[(triton.cdiv(count, _BLOCK * _BLOCKS),)](data, out, count, BLOCK=_BLOCK, BLOCKS=_BLOCKS, num_warps=8)


@triton.jit  # type: ignore[untyped-decorator]
def _read(data_ptr: tl.tensor, out_ptr: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, BLOCKS: tl.constexpr) -> None:
    first = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in range(BLOCKS):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        total = total ^ tl.load(data_ptr + at, mask=at < count, other=0)
    # Random numbers hardly ever come to this, so nothing is written; but all of them must be read to know.
    if tl.xor_sum(total) == 0x5EED5EED:
        tl.store(out_ptr, 1)
