"""The tensor-parallel ranks of a model as threads of this process, for what a rank computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pdserve.disaggregation.transfer.region import allocate_region, map_region
from pdserve.model_runner.kernels.ranks import NativeRanks
from pdserve.model_runner.model_runner import ModelRunner
from pdserve.model_runner.tensor_parallel.host_ranks import HostRanks, Meeting, Own, Shared
from pdserve.runtime.options import ServerOptions
from pdserve.runtime.ranks import RankPlace
from support.machine import limit

T = TypeVar("T")
NOWHERE = Meeting(None, Path("/nonexistent"), 0.0)


class Table:
    """Where the threads put what others take, all in step."""

    def __init__(self, size: int) -> None:
        self.shared: Shared | None = None
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.all_here = threading.Barrier(size)


class ThreadGroup:
    """``RankGroup`` of threads."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def sum(self, part_TN: Tensor) -> Tensor:
        """See the protocol."""
        parts = self._exchange(part_TN)
        return torch.stack([part.float() for part in parts]).sum(0).to(part_TN.dtype)

    def join(self, columns: Tensor) -> Tensor:
        """See the protocol."""
        return torch.cat(self._exchange(columns), 1)

    def meet(self) -> None:
        """See the protocol."""
        self._table.all_here.wait(limit(20))

    def _exchange(self, own: Tensor) -> list[Tensor]:
        self._table.all_here.wait(limit(20))
        self._table.parts[self._rank] = own
        self._table.all_here.wait(limit(20))
        return list(self._table.parts)


class ThreadRank(HostRanks):
    """Rank 0 is made first."""

    def __init__(self, rank: int, size: int, table: Table) -> None:
        super().__init__(RankPlace(rank, size), NOWHERE)
        self._table = table

    def join(self) -> Any:
        """What a torch model asks of a world."""
        return self

    def torch_ranks(self, vocab: int) -> ThreadGroup:
        """See ``World``."""
        return ThreadGroup(self._table, self.place.rank)

    def share(self, own: Own) -> Shared:
        """See the base class."""
        lead, room = self._table.shared, own.room
        if lead is None:
            pages = own.choose_pages(own.weight_bytes)
            region = allocate_region(pages * own.page_bytes, shared=True)
            self._table.shared = Shared(pages, region, None if room is None else NativeRanks(self.place, room))
            return self._table.shared
        assert lead.region.fd is not None
        region = map_region(os.dup(lead.region.fd), lead.region.nbytes)
        exchange = None
        if room is not None and lead.exchange is not None:
            exchange = NativeRanks(self.place, room, os.dup(lead.exchange.fd))
        return Shared(lead.num_pages, region, exchange)


def make_ranks(size: int, options: ServerOptions) -> list[ModelRunner]:
    """A runner for each rank. Raises what the first can't be made for."""
    table = Table(size)
    return [ModelRunner(options, ranks=ThreadRank(rank, size, table)) for rank in range(size)]


def together(runners: list[ModelRunner], compute: Callable[[ModelRunner], T]) -> T:
    """What rank 0 gives for something that every one computes."""
    with ThreadPoolExecutor(len(runners)) as pool:
        results = list(pool.map(compute, runners))
    return results[0]
