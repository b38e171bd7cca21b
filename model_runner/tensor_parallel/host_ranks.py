"""A rank among those of its host: the memory that they share, and who is told what is to be computed.

On a CPU the ranks of a host have one KV pool, each with its own heads of every page. So whatever moves pages sees whole
ones, and instances of unlike sizes exchange them as any two do. The lead makes the memory; the others map it.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ...disaggregation.transfer.region import KVRegion, allocate_region, map_region
from ...messages.channel import Receiver, Sender, UndeclaredMessage
from ...messages.worker import FollowerCommand, ForwardStep, RankSetup
from ...model_files.sharding import Shard, shard
from ...model_files.spec import ModelSpec
from ...runtime.ranks import RankPlace
from ..kernels.ranks import ExchangeRoom, NativeRanks
from .carrier import Carrier
from .watch import end_process, gone, start_watch
from .world import World

log = logging.getLogger(__name__)


class Shared(NamedTuple):
    """``num_pages``: of the pool, with page 0. ``exchange``: None for a torch model, which exchanges otherwise."""

    num_pages: int
    region: KVRegion
    exchange: NativeRanks | None


class Meeting(NamedTuple):
    """Where the ranks of several hosts, or of a torch model, find each other, and how long they look (seconds).

    ``outside``: what threads that don't compute are started in.
    """

    address: str | None
    run_dir: Path
    seconds: float
    outside: Callable[[], AbstractContextManager[None]] = nullcontext


class HostRanks(ABC):
    """One rank. Made → ``share`` once, when its part of the model is loaded → steps."""

    def __init__(self, place: RankPlace, meeting: Meeting) -> None:
        self.place = place
        self._meeting = meeting

    @cached_property
    def world(self) -> World:
        """All ranks; waits for them the first time. Raises ``UnsupportedModel``."""
        address, run_dir, seconds, outside = self._meeting
        with outside():
            return World(self.place, address, run_dir, seconds)

    def shard(self, spec: ModelSpec) -> Shard:
        """This rank's part of a model; raises ``UnsupportedModel`` where it can't be divided."""
        return shard(spec, self.place.rank, self.place.size)

    def pool_heads(self, spec: ModelSpec) -> tuple[int, int]:
        """``[begin, end)`` of the model's KV heads that the host's pool has."""
        first = shard(spec, self.place.first, self.place.size).kv_heads()
        last = shard(spec, self.place.first + self.place.local_size - 1, self.place.size).kv_heads()
        return first[0], last[1]

    def own_heads(self, spec: ModelSpec) -> tuple[int, int]:
        """``[begin, end)`` of the pool's heads that are this rank's."""
        (begin, end), first = self.shard(spec).kv_heads(), self.pool_heads(spec)[0]
        return begin - first, end - first

    @abstractmethod
    def share(
        self, choose_pages: Callable[[], int], page_bytes: int, room: ExchangeRoom | None, identity: str
    ) -> Shared:
        """The memory that this host's ranks share. ``choose_pages``: how many there may be here, with page 0.

        ``identity``: what all ranks must agree on. Raises ``ModelError``, ``RegionError`` and ``OSError``.
        """


class Lead(HostRanks):
    """The first rank of a host, which tells ``followers``, the others there."""

    def __init__(self, place: RankPlace, meeting: Meeting, followers: Sequence[Sender]) -> None:
        super().__init__(place, meeting)
        self.followers = followers

    def share(
        self, choose_pages: Callable[[], int], page_bytes: int, room: ExchangeRoom | None, identity: str
    ) -> Shared:
        """See the base class."""
        pages, carrier = choose_pages(), None
        if self.place.nodes > 1:
            carrier = Carrier(self.world)
            pages = carrier.agree(pages, identity)
            with self._meeting.outside():
                start_watch(self.world)
        region = allocate_region(pages * page_bytes, shared=True)
        exchange = None
        if room is not None:
            exchange = NativeRanks(self.place, room, carry=None if carrier is None else carrier.carry)
            if carrier is not None:
                carrier.exchange = exchange
        assert region.fd is not None
        setup = RankSetup(os.getpid(), region.fd, pages, None if exchange is None else exchange.fd)
        for follower in self.followers:
            follower.send(setup)
        return Shared(pages, region, exchange)

    def next_frame(self) -> bytes:
        """The step that rank 0, on another host, computes now; waits for it. Ends the process where that is gone."""
        try:
            return self.world.recv_frame()
        except RuntimeError as e:
            end_process(gone(0, 0), e)
            raise


class Follower(HostRanks):
    """Another rank of a host, which its lead tells by ``commands``."""

    def __init__(self, place: RankPlace, meeting: Meeting, commands: Receiver[FollowerCommand]) -> None:
        super().__init__(place, meeting)
        self._commands = commands

    def share(
        self, choose_pages: Callable[[], int], page_bytes: int, room: ExchangeRoom | None, identity: str
    ) -> Shared:
        """See the base class."""
        if self.place.nodes > 1:
            # Its groups are made by all ranks, or by none.
            assert self.world is not None
        setup = self._next()
        if not isinstance(setup, RankSetup):
            raise RuntimeError(f"rank {self.place.rank} was sent {type(setup).__name__} before its setup")
        region = map_region(_opened(setup.pid, setup.pool), setup.num_pages * page_bytes)
        exchange = None
        if room is not None and setup.exchange is not None:
            exchange = NativeRanks(self.place, room, _opened(setup.pid, setup.exchange))
        return Shared(setup.num_pages, region, exchange)

    def next_step(self) -> ForwardStep:
        """What the lead computes now; waits for it."""
        step = self._next()
        if not isinstance(step, ForwardStep):
            raise RuntimeError(f"rank {self.place.rank} was set up twice")
        return step

    def _next(self) -> FollowerCommand:
        while True:
            try:
                if commands := self._commands.recv(-1):
                    return commands[0]
            except UndeclaredMessage as e:
                log.error("%s", e)


def _opened(pid: int, fd: int) -> int:
    # Memory without a name: the lead's own descriptor is the way to it, for processes of the same user.
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
