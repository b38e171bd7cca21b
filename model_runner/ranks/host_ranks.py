"""A rank among those of its host: the memory that they share, and which rank sends steps to which.

On a CPU the ranks of a host have one KV pool, each with its own heads of every page. So whatever moves pages sees whole
ones, and instances of unlike sizes exchange them as any two do. The lead makes the memory; the others map it.

On GPUs each rank has a device, and on it a pool of its own, of its own heads alone. All that they share is the number
of pages (``agree``).
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...mem_cache.kv_pages.region import KVRegion, allocate_region, map_region
from ...messages.channel import Receiver, Sender
from ...messages.memory import MemoryCommand, TrimPool
from ...messages.profiling import ProfileCommand
from ...messages.worker import CaptureGraphs, FollowerCommand, ForwardStep, RankLoaded, RankSetup
from ...model_files.sharding import Shard, shard
from ...model_files.spec import ModelSpec
from ...runtime.ranks import RankPlace
from ..cpu_engine.no_exchange import NoExchange
from ..kv.layout import KVShape
from ..kv.pools import PoolPlan
from ..torch_import import note_torch
from .part import Own
from .process_end import end_process, gone

if TYPE_CHECKING:
    from ..cpu_engine.ranks import NativeRanks
    from .world import World

SPARE_SECONDS = 5.0


class Shared(NamedTuple):
    """What the ranks of a host share."""

    plan: PoolPlan
    region: KVRegion
    """Memory of the pool."""
    exchange: NativeRanks | NoExchange
    """Exchange within a pass of the C++ engine; a torch model exchanges otherwise."""


class Meeting(NamedTuple):
    """Where the ranks of several hosts, or of a torch model, find each other.

    ``deadline``: by ``time.monotonic()``. ``outside``: what threads that don't compute are started in.
    """

    address: str | None
    run_dir: Path
    deadline: float
    outside: Callable[[], AbstractContextManager[None]] = nullcontext


class HostRanks(ABC):
    """One rank. Made → ``share`` (or ``agree``) once, when its part of the model is loaded → steps."""

    def __init__(self, place: RankPlace, meeting: Meeting) -> None:
        self.place = place
        self._meeting = meeting
        self._world: World | None = None

    def join(self) -> World:
        """Connect to all other ranks by torch.distributed at the first call, and return the connections.

        Waits for the others: all ranks call this, or none. Raises ``UnsupportedModel`` if they don't meet in time.
        """
        if self._world is None:
            note_torch("torch.distributed, by which ranks of several hosts, or of a torch model, exchange")
            from .world import World

            address, run_dir, deadline, outside = self._meeting
            # Before the supervisor, which knows less of the reason, gives up.
            seconds = max(deadline - time.monotonic() - SPARE_SECONDS, SPARE_SECONDS)
            with outside():
                self._world = World(self.place, address, run_dir, seconds)
        return self._world

    def shard(self, spec: ModelSpec) -> Shard:
        """Return the part of the model ``spec`` that this rank computes.

        Raises ``UnsupportedModel`` if the model can't be divided among the ranks.
        """
        return shard(spec, self.place.rank, self.place.size)

    def pool_heads(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the range ``[begin, end)`` of the model's KV heads that the shared pool of this host has."""
        first = shard(spec, self.place.first, self.place.size).kv_heads()
        last = shard(spec, self.place.first + self.place.local_size - 1, self.place.size).kv_heads()
        return first[0], last[1]

    def kept(self, spec: ModelSpec) -> KVShape:
        """Return the KV sizes of the pool that this host's ranks share: all layers, and the heads of these ranks."""
        begin, end = self.pool_heads(spec)
        return KVShape(spec.num_layers, end - begin, spec.head_dim, spec.latent_dim)

    def kept_apart(self, spec: ModelSpec) -> KVShape:
        """Return the KV sizes of a pool of this rank alone, on a device of its own: all layers, and its own heads."""
        begin, end = self.shard(spec).kv_heads()
        return KVShape(spec.num_layers, end - begin, spec.head_dim, spec.latent_dim)

    def agree(self, pages: int, identity: str) -> int:
        """Return the smallest ``pages`` of all ranks: the pages that each rank's own pool gets.

        Every rank must call this. ``pages``: what this rank has room for. Raises ``UnsupportedModel`` if the ranks'
        identities differ.
        """
        return self.join().agree(pages, identity)

    def own_heads(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the range ``[begin, end)`` of this rank's heads, counted from the first head of the host's pool."""
        (begin, end), first = self.shard(spec).kv_heads(), self.pool_heads(spec)[0]
        return begin - first, end - first

    @abstractmethod
    def share(self, own: Own) -> Shared:
        """Make the memory that this host's ranks share, or map what the lead made; wait for the other ranks.

        ``own``: sizes of this rank's weights and pages. Raises ``ModelError``, ``RegionError`` or ``OSError``.
        """


class LeadRank(HostRanks):
    """The first rank of a host, which tells ``followers``, the others there."""

    def __init__(
        self, place: RankPlace, meeting: Meeting, followers: Sequence[Sender], loaded: Receiver[RankLoaded] | None
    ) -> None:
        super().__init__(place, meeting)
        self.followers = followers
        self.numbers = tuple(place.followers)
        """Numbers of the other ranks of this host."""
        self._loaded = loaded

    def share(self, own: Own) -> Shared:
        """Wait for all ranks' weights, allocate the shared pool and exchange memory, and tell the followers.

        With several hosts, all of them use the smallest number of pages that any has room for.
        """
        plan, carry = own.plan_pools(self._host_bytes(own.weight_bytes)), None
        if self.place.nodes > 1:
            world = self.join()
            # Imported here: they import torch.
            from .carrier import Carrier
            from .watch import start_watch

            carrier = Carrier(world)
            carry = carrier.carry
            plan = plan._replace(num_pages=carrier.agree(plan.num_pages, own.identity))
            with self._meeting.outside():
                start_watch(world)
        region = allocate_region(plan.num_pages * own.page_bytes, shared=True)
        exchange = own.room.make(self.place, carry=carry)
        assert region.fd is not None
        setup = RankSetup(os.getpid(), region.fd, plan.num_pages, exchange.fd)
        for follower in self.followers:
            follower.send(setup)
        return Shared(plan, region, exchange)

    def tell(self, command: MemoryCommand | TrimPool | ProfileCommand) -> None:
        """Send ``command`` to the other ranks of this host, and don't wait. They execute it after earlier steps."""
        for follower in self.followers:
            follower.send(command)

    def answers(self) -> list[str]:
        """Wait until every other rank of this host has answered a command; return the errors of those that failed."""
        loaded: list[RankLoaded] = []
        while self._loaded is not None and len(loaded) < len(self.followers):
            loaded += self._loaded.recv(-1)
        return [f"rank {rank.rank}: {rank.error}" for rank in loaded if rank.error]

    def next_frame(self) -> bytes:
        """Wait for the next step from rank 0, on another host, and return it as encoded bytes.

        Only the lead of a host without rank 0 calls this. Ends the process if rank 0 is gone.
        """
        try:
            return self.join().recv_frame()
        except RuntimeError as e:
            end_process(gone(0, 0), e)

    def _host_bytes(self, weight_bytes: int) -> int:
        """Wait until all ranks of this host have loaded their weights, and return the sum of their bytes.

        ``weight_bytes``: those of this rank.
        """
        sizes = [weight_bytes]
        while self._loaded is not None and len(sizes) < self.place.local_size:
            sizes += [loaded.weight_bytes for loaded in self._loaded.recv(-1)]
        return sum(sizes)


class FollowerRank(HostRanks):
    """Another rank of a host, which its lead tells by ``commands``."""

    def __init__(self, place: RankPlace, meeting: Meeting, commands: Receiver[FollowerCommand], lead: Sender) -> None:
        super().__init__(place, meeting)
        self._commands = commands
        self._lead = lead

    def share(self, own: Own) -> Shared:
        """Report this rank's weight bytes to the lead, wait for its ``RankSetup``, and map the memory that it names."""
        self._lead.send(RankLoaded(self.place.rank, own.weight_bytes))
        if self.place.nodes > 1:
            self.join()
        [setup] = self._commands.recv(-1)
        if not isinstance(setup, RankSetup):
            raise RuntimeError(f"rank {self.place.rank} was sent {type(setup).__name__} before its setup")
        region = map_region(_opened(setup.pid, setup.pool), setup.num_pages * own.page_bytes)
        exchange = own.room.make(self.place, None if setup.exchange is None else _opened(setup.pid, setup.exchange))
        return Shared(PoolPlan(setup.num_pages), region, exchange)

    def answer(self, weight_bytes: int, error: str) -> None:
        """Tell the lead that this rank has executed its command, or why it failed.

        ``error``: the reason; empty if it succeeded. ``weight_bytes``: the rank's weights, which the lead ignores here.
        """
        self._lead.send(RankLoaded(self.place.rank, weight_bytes, error))

    def next_step(
        self, timeout_ms: int
    ) -> ForwardStep | MemoryCommand | TrimPool | ProfileCommand | CaptureGraphs | None:
        """Return the lead's next step or other command, or None after ``timeout_ms`` milliseconds (-1: wait for ever).

        Raises ``UndeclaredMessage`` or ``RuntimeError`` for anything else: a step that one rank skips hangs them all.
        """
        commands = self._commands.recv(timeout_ms)
        if not commands:
            return None
        [step] = commands
        if isinstance(step, RankSetup):
            raise RuntimeError(f"rank {self.place.rank} was set up twice")
        return step


def _opened(pid: int, fd: int) -> int:
    # Memory without a name: the lead's own descriptor is the way to it, for processes of the same user.
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
