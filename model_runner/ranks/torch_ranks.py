"""Ranks that exchange by torch.distributed: the torch model's, on the host's processors or on a GPU each."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


class TorchRanks:
    """``RankGroup`` over ``group``'s ranks, by gloo or NCCL, for a model of ``vocab`` tokens on ``device``.

    Nothing waits for the device, and where that can be captured, so can these. R: ranks.
    """

    def __init__(self, group: dist.ProcessGroup, vocab: int, device: torch.device) -> None:
        self._group, self._size, self._device = group, group.size(), device
        ends = [vocab * rank // self._size for rank in range(self._size + 1)]
        self._columns = [end - begin for begin, end in pairwise(ends)]

    def sum(self, part_TN: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, in the type of ``part_TN``, added in float32 in the order of the ranks.

        NCCL's own sums are not used, because their order depends on the number of elements.
        """
        parts_RTN = self._gather(part_TN)
        total = parts_RTN[0].to(torch.float32, copy=True)
        for rank in range(1, self._size):
            total += parts_RTN[rank]
        return total.to(part_TN.dtype)

    def join(self, columns: Tensor) -> Tensor:
        """Gather all ranks' columns of the logits, and return them side by side: [rows, vocabulary].

        Exchanged columns are padded to the widest rank's.
        """
        padded = torch.nn.functional.pad(columns, (0, max(self._columns) - columns.shape[1]))
        parts = self._gather(padded)
        return torch.cat([parts[rank, :, :width] for rank, width in enumerate(self._columns)], 1)

    def meet(self) -> None:
        """Exchange a number with all ranks.

        On a GPU this is only queued, and holds up the device until all have reached it.
        """
        self._gather(torch.zeros(1, device=self._device))

    def _gather(self, part: Tensor) -> Tensor:
        """Return each rank's ``part`` as [R, ...]. All parts have the same shape and type."""
        own = part.contiguous()
        parts = own.new_empty((self._size, *own.shape))
        if own.numel():
            # As bytes: every type goes that way, and nothing is added up there.
            flat = own.view(torch.uint8).view(-1)
            dist.all_gather_into_tensor(parts.view(torch.uint8).view(-1), flat, group=self._group)
        return parts
