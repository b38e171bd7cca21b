"""The tensor-parallel ranks of a model as threads of this process, for what a rank computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from pdserve.mem_cache.kv_pages.region import allocate_region, map_region
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.ranks.host_ranks import HostRanks, Meeting, Shared
from pdserve.model_runner.ranks.part import Own
from pdserve.runtime.ranks import RankPlace
from pdserve.server.options import ServerOptions
from support.machine import limit

T = TypeVar("T")
R = TypeVar("R")
NOWHERE = Meeting(None, Path("/nonexistent"), 0.0)


class Table:
    """Where the threads put what others take, all in step."""

    tables: ClassVar[list[Table]] = []

    def __init__(self, size: int) -> None:
        self.shared: Shared | None = None
        self.parts: list[Any] = [None] * size
        self.all_here = threading.Barrier(size)
        self.number = len(self.tables)
        self.tables.append(self)

    def exchange(self, own: Any, rank: int) -> list[Any]:
        """Return what every rank gives."""
        self.all_here.wait(limit(20))
        self.parts[rank] = own
        self.all_here.wait(limit(20))
        return list(self.parts)


@torch.library.custom_op("pdserve_tests::exchange", mutates_args=())
def exchange(own: Tensor, table: int, rank: int, dim: int) -> Tensor:
    """Join every rank's tensor along ``dim``. It is an operation, so that a captured pass has it, too."""
    return torch.cat(Table.tables[table].exchange(own.clone(), rank), dim)


def look_up_one_at_a_time(kind: Any) -> None:
    """Let a thread that looks up an operator or one of its overloads in a ``kind`` wait while another one does.

    Torch makes it at the first look, and keeps one alone. With a dispatch mode, an operation has a borrowed reference
    to the one that it made. If another thread has made it again meanwhile, that is freed memory.
    """
    make, lock = kind.__getattr__, threading.RLock()

    def find(self: Any, name: str) -> Any:
        with lock:
            return vars(self)[name] if name in vars(self) else make(self, name)

    kind.__getattr__ = find


look_up_one_at_a_time(type(torch.ops.aten))
look_up_one_at_a_time(type(torch.ops.aten.add))


class ThreadGroup:
    """``RankGroup`` of threads."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def sum(self, part_TN: Tensor) -> Tensor:
        """See the protocol."""
        parts = exchange(part_TN[None], self._table.number, self._rank, 0)
        return parts.float().sum(0).to(part_TN.dtype)

    def join(self, columns: Tensor) -> Tensor:
        """See the protocol."""
        return exchange(columns, self._table.number, self._rank, 1)

    def meet(self) -> None:
        """See the protocol."""
        self._table.all_here.wait(limit(20))


class ThreadRank(HostRanks):
    """Rank 0 is made first."""

    def __init__(self, rank: int, size: int, table: Table) -> None:
        super().__init__(RankPlace(rank, size), NOWHERE)
        self._table = table

    def join(self) -> Any:
        """Return this object in the place of a torch model's world."""
        return self

    def torch_ranks(self, vocab: int, device: torch.device) -> ThreadGroup:
        """See ``World``."""
        return ThreadGroup(self._table, self.place.rank)

    def agree(self, pages: int, identity: str) -> int:
        """See the base class; of ranks that are made at the same time."""
        given = self._table.exchange((pages, identity), self.place.rank)
        assert len({identity for _, identity in given}) == 1
        return min(pages for pages, _ in given)

    def share(self, own: Own) -> Shared:
        """See the base class."""
        lead, room = self._table.shared, own.room
        if lead is None:
            plan = own.plan_pools(own.weight_bytes)
            region = allocate_region(plan.num_pages * own.page_bytes, shared=True)
            self._table.shared = Shared(plan, region, room.make(self.place))
            return self._table.shared
        assert lead.region.fd is not None
        region = map_region(os.dup(lead.region.fd), lead.region.nbytes)
        fd = lead.exchange.fd
        exchange = room.make(self.place, None if fd is None else os.dup(fd))
        return Shared(lead.plan, region, exchange)


def make_ranks(size: int, options: ServerOptions) -> list[LoadedModel]:
    """Make a runner for each rank. Raises what making the first one raises."""
    table = Table(size)
    return [load_model(options, ranks=ThreadRank(rank, size, table)) for rank in range(size)]


def make_apart(size: int, options: ServerOptions) -> list[LoadedModel]:
    """Load a model for ranks that have a device each, all at the same time."""
    table = Table(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: load_model(options, ranks=ThreadRank(rank, size, table)), range(size)))


def together(runners: list[R], compute: Callable[[R], T]) -> T:
    """Run ``compute`` on every rank, and return the result of rank 0."""
    with ThreadPoolExecutor(len(runners)) as pool:
        results = list(pool.map(compute, runners))
    return results[0]
