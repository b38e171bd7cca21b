"""The order in which waiting requests are tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from ..req import Req, ReqState

if TYPE_CHECKING:
    from ..estimates.cost_model import CostModel
    from ..kv_memory import KVMemory


class PolicyOptions(Protocol):
    """The options that policies read."""

    @property
    def schedule_policy(self) -> str: ...
    @property
    def disaggregation_mode(self) -> str: ...
    @property
    def random_seed(self) -> int: ...


class PolicyNeeds(NamedTuple):
    """What policies are made of."""

    options: PolicyOptions
    memory: KVMemory
    model: CostModel


class SchedulePolicy(ABC):
    """Orders the waiting requests of each *lane*. ``WaitingQueue`` decides which lane is next.

    A policy is notified of requests that come and go, and keeps what makes an order cheap to ask for at each step.
    Retracted requests are not its concern: they come first, since their clients are already reading.
    """

    may_pass = False
    """Whether a waiting request may ever go before one that is in the middle of its prompt."""

    @classmethod
    def make(cls, needs: PolicyNeeds) -> Self:
        """Make the policy. Overridden by a policy with arguments of its constructor."""
        return cls()

    @abstractmethod
    def add(self, req: Req, lane: int) -> None:
        """Add a request that waits in ``lane`` from now on."""

    @abstractmethod
    def remove(self, req: Req) -> None:
        """Remove a request that no longer waits."""

    @abstractmethod
    def order(self, lane: int, *, computing_only: bool = False) -> Iterator[Req]:
        """Yield the requests of ``lane`` in order, each once, and determine each one only when it is drawn.

        ``computing_only``: leave out requests with KV that comes from a peer, as if they did not wait. A request may be
        removed before the next is drawn; none may be added.
        """

    def begun(self, reqs: list[Req]) -> list[Req]:
        """Return the requests with incomplete prompts, which have memory, in the order in which they get their next
        pieces.

        Here that is the order in which they began.
        """
        return reqs

    def is_before(self, waiting: Req, begun: Req) -> bool:
        """Return whether the request ``waiting`` goes before ``begun``, which is in the middle of its prompt; here
        never.
        """
        return False

    def ahead_of(self, req: Req, uncached: int, others: Iterable[Req]) -> list[Req]:
        """Return those of ``others``, waiting or in the middle of their prompts, that are expected to go before
        ``req``.

        Here these are the started ones and those that arrived earlier. ``uncached``: tokens of ``req`` to be computed.
        """
        return [r for r in others if r.state is ReqState.PREFILLING or r.times.fcfs_time < req.times.fcfs_time]
