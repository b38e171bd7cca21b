"""Ranks that exchange by torch.distributed: the torch model's, on one host or several."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


class TorchRanks:
    """``RankGroup`` over ``group``'s ranks, by gloo, for a model of ``vocab`` tokens."""

    def __init__(self, group: dist.ProcessGroup, vocab: int) -> None:
        self._group, self._size = group, group.size()
        ends = [vocab * rank // self._size for rank in range(self._size + 1)]
        self._columns = [end - begin for begin, end in pairwise(ends)]

    def sum(self, part_TN: Tensor) -> Tensor:
        """See the protocol."""
        first, *others = self._gather(part_TN)
        total = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        return total.to(part_TN.dtype)

    def join(self, columns: Tensor) -> Tensor:
        """See the protocol."""
        padded = torch.nn.functional.pad(columns, (0, max(self._columns) - columns.shape[1]))
        parts = self._gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, self._columns, strict=True)], 1)

    def meet(self) -> None:
        """See the protocol."""
        self._gather(torch.zeros(1))

    def _gather(self, part: Tensor) -> list[Tensor]:
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._size)]
        # As bytes: gloo moves every type that way, and adds nothing up here.
        dist.all_gather([p.view(torch.uint8) for p in parts], own.view(torch.uint8), group=self._group)
        return parts
