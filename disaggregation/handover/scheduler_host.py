"""``HandoverHost`` over the real scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import I32, Message
from ...messages.outputs import FinishReason, FinishType, TokenLogprob
from ...scheduler.req import Req, ReqState
from ...scheduler.scheduler import Scheduler


class SchedulerHost:
    """``HandoverHost`` over the real scheduler."""

    def __init__(self, scheduler: Scheduler, epoch: str) -> None:
        self._scheduler = scheduler
        self.epoch = epoch

    def to_worker(self, message: Message) -> None:
        """See ``HandoverHost``."""
        self._scheduler.outbox.to_worker(message)

    def enqueue(self, req: Req, now: float) -> None:
        """See ``HandoverHost``."""
        self._scheduler.enqueue(req, now)

    def end_outgoing(self, req: Req) -> None:
        """See ``HandoverHost``."""
        self._scheduler.end(req, ReqState.FINISHED, FinishReason(FinishType.LENGTH))

    def start_incoming(self, req: Req, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """See ``HandoverHost``."""
        # Known before the row is taken: the sampler's history begins with it.
        req.append(token, logprob)
        self._scheduler.planner.start_landed(req)
        self._scheduler.on_newest_token(req, token, now)

    def admit_incoming(self, req: Req, others: Iterable[Req]) -> bool:
        """See ``HandoverHost``. A retracted request waits for memory longer than any newcomer: it goes first."""
        planner, memory = self._scheduler.planner, self._scheduler.memory
        if any(r.retractions for r in planner.waiting.values()):
            return False
        busy = [*planner.running.values(), *others]
        reserve = planner.reserve.tokens([*busy, req]) if busy else 0
        admitted = memory.admit(req, reserve, prefix_limit=req.prompt_len, verified=False)
        if admitted:
            planner.count_lookup(req)
        return admitted

    def end(self, req: Req, state: ReqState, finish: FinishReason | None) -> None:
        """See ``HandoverHost``."""
        self._scheduler.end(req, state, finish)

    def fail(self, req: Req, status: int, message: str, kind: str = "server_error") -> None:
        """See ``HandoverHost``."""
        self._scheduler.fail(req, status, message, kind)

    def pin(self, req: Req) -> KVHold:
        """See ``HandoverHost``."""
        return self._scheduler.memory.pin(req)

    def unpin(self, hold: KVHold) -> None:
        """See ``HandoverHost``."""
        self._scheduler.memory.unpin(hold)

    def pages(self, req: Req, start: int, end: int) -> I32:
        """See ``HandoverHost``."""
        return self._scheduler.memory.pages(req, start, end)

    @property
    def last_step_id(self) -> int:
        """See ``HandoverHost``."""
        return self._scheduler.planner.last_step_id

    @property
    def completed_step(self) -> int:
        """See ``HandoverHost``."""
        return self._scheduler.completed_step
