"""Memory that is given back to the system while this instance is not needed, and taken again (the memory saver).

::

    HELD ─release─▶ EMPTYING ─nothing runs─▶ PARTING ─no peer can write─▶ RELEASING ─worker confirms─▶ RELEASED
      ▲                 │ still running after wait_s    │ a link that stays                               │
      ├─────────────────┴───────────────────────────────┘                                              resume
      └─────────────────────────────────── RESUMING ◀─────────────────────────────────────────────────────┘

- Running and queued requests are never cut short. A release waits ``wait_s`` for their end (0: not at all), and is
  refused with 409 if they continue. From the release order until all memory is held again, new requests are refused
  with 503. ``/health`` says why, so that a router asks another instance.
- An instance that lacks memory exchanges no KV, whichever part of it is missing. It withdraws its registration,
  disconnects from all peers and refuses new ones. Once the last link is down no peer can write to the pool. The
  instance registers again when all memory is held.
- Giving up the pool empties the prefix cache. What a host tier has stays there, and saves are done first. Giving up
  only the weights leaves the cache as it is, as they come back unchanged or not at all.
- Memory can be resumed in parts, and more can be released. A part that is there already, or gone already, is a 409. So
  is any order while a change is under way.
"""

from __future__ import annotations

import logging
import math
from enum import StrEnum
from typing import Any

from ...messages.error_codes import UNAVAILABLE
from ...messages.memory import (
    ALL_TAGS,
    MemoryChanged,
    MemoryReq,
    MemoryResult,
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
)
from ...messages.metrics import Family
from ...messages.question import RefusedAnswer
from ...runtime.metrics import Metrics, gauge, read
from ..feature import Feature
from ..handlers import answers, receives
from ..refusals import BUSY, Refusal
from ..scheduler import Scheduler

log = logging.getLogger(__name__)

PARTING_SECONDS = 10.0
"""Seconds for peers to release their links; a transfer library's own limits are shorter."""
ORDERS = {True: "release", False: "resume"}
PATHS = {True: "POST /release_memory_occupation", False: "POST /resume_memory_occupation"}


class MemoryState(StrEnum):
    """State of the memory; the module shows the transitions."""

    HELD = "held"
    EMPTYING = "emptying"
    PARTING = "parting"
    RELEASING = "releasing"
    RELEASED = "released"
    RESUMING = "resuming"


AT_REST = (MemoryState.HELD, MemoryState.RELEASED)


class MemorySaver(Feature):
    """The instance's memory, as its scheduler sees it. Called from the scheduler's loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kept = {item.tag: item.reason for item in scheduler.worker.unreleasable}
        self._order: MemoryReq | None = None
        self._tags: list[MemoryTag] = []
        self._until = math.inf
        self.state = MemoryState.HELD
        self.released: list[MemoryTag] = []
        """Memory that is released now."""
        scheduler.gate.add(self._refuse)

    def _refuse(self) -> Refusal | None:
        problem = self.problem(0.0)
        return None if problem is None else Refusal(503, problem, BUSY, code=UNAVAILABLE)

    def problem(self, now: float) -> str | None:
        """Return why nothing is computed here; None if all memory is held and none is being given back."""
        if self.state is MemoryState.HELD:
            return None
        if self.state is MemoryState.RESUMING:
            return "the instance takes its memory again; try again in a few seconds"
        if not self.released:
            return "the instance gives its memory back; send the request to another one"
        return f"memory was given back ({', '.join(self.released)}); {PATHS[False]} takes it again"

    def seconds_left(self, now: float) -> float:
        """Return the seconds that a release still waits for running requests or for peers.

        0 means that its deadline has passed. Infinity means that no deadline is set.
        """
        return max(0.0, self._until - now)

    @answers(MemoryReq)
    def ask(self, order: MemoryReq, now: float) -> MemoryResult | RefusedAnswer | None:
        """Begin to release or resume memory, and return None: the answer is sent when the worker is done, or a wait has
        failed.

        Refuse with 409 what can't be done in the present state.
        """
        tags = self._meant(order)
        problem = self._problem(order, tags)
        if problem is not None:
            log.info("memory stays as it is (%s): %s", ORDERS[order.release], problem)
            return RefusedAnswer(409, problem)
        self._order, self._tags = order, tags
        if not order.release:
            self._tell_worker(ResumeMemory(tags), MemoryState.RESUMING)
        elif self.state is MemoryState.RELEASED:
            self._release()
        else:
            self.state, self._until = MemoryState.EMPTYING, now + order.wait_s
            self.tick(now)
        return None

    def tick(self, now: float) -> None:
        """Advance a release: wait for running requests, disconnect peers, then order the worker to release the memory.

        If a wait exceeds its deadline, keep the memory and refuse the order with 409.
        """
        if self._order is None:
            return
        scheduler, peers, order = self._scheduler, self._scheduler.handovers.membership, self._order
        if self.state is MemoryState.EMPTYING:
            if not self._is_quiet:
                if now >= self._until:
                    self._stay(order, f"{self._running()}; wait for them (wait_s), abort them, or drain the instance")
                return
            self.state, self._until = MemoryState.PARTING, now + PARTING_SECONDS
            peers.close("its memory was given back")
        if self.state is MemoryState.PARTING:
            if not peers.is_closed:
                if now >= self._until:
                    self._stay(
                        order, f"a peer did not let go of this instance's KV memory within {PARTING_SECONDS:.0f} s"
                    )
                return
            if not self._is_quiet:
                raise AssertionError(f"{len(scheduler.reqs)} requests began while memory was being given back")
            self._release()

    @receives(MemoryChanged)
    def on_changed(self, changed: MemoryChanged, now: float) -> None:
        """Note which memory the worker now has released, and answer the order that it has carried out or failed to.

        Peers may connect again once no memory is released.
        """
        order, self._order = self._order, None
        assert order is not None
        self.released = changed.released
        self.state = MemoryState.RELEASED if self.released else MemoryState.HELD
        if self.state is MemoryState.HELD:
            self._scheduler.handovers.membership.open()
        log.info("%s of %s: %s", ORDERS[order.release], ", ".join(self._tags), changed.error or "done")
        done = MemoryResult(self.released, changed.nbytes, changed.seconds)
        self._answer(order, RefusedAnswer(503, changed.error) if changed.error else done)

    def status(self, now: float) -> dict[str, Any]:
        """Return ``memory``: its state, the tags that are released now, and why other tags can't be released."""
        return {"memory": {"state": self.state, "released": self.released, "unreleasable": self._kept}}

    def metrics(self, now: float) -> list[Family]:
        """Return ``pdserve_memory_released``: 1 for each kind of memory that is released now, 0 for the others."""
        return read(METRICS, self)

    def _meant(self, order: MemoryReq) -> list[MemoryTag]:
        """Return the tags that the order names, once each.

        If it names none, return all that are not released yet for a release order, and all released ones for a resume
        order.
        """
        if order.tags:
            return [tag for tag in ALL_TAGS if tag in order.tags]
        return [tag for tag in ALL_TAGS if (tag in self.released) != order.release]

    def _problem(self, order: MemoryReq, tags: list[MemoryTag]) -> str | None:
        if self.state not in AT_REST:
            return f"memory is {self.state} just now; ask again when that is over"
        if not order.release:
            there = [tag for tag in tags if tag not in self.released]
            if there or not tags:
                return f"{', '.join(there) or 'all memory'} was not given back: there is nothing to resume"
            return None
        gone = [tag for tag in tags if tag in self.released]
        if gone or not tags:
            return f"{', '.join(gone or ALL_TAGS)} was given back already; {PATHS[False]} takes it again"
        kept = [tag for tag in tags if tag in self._kept]
        if kept:
            others = [tag for tag in ALL_TAGS if tag not in self._kept]
            advice = f'; ask with "tags": {others}'.replace("'", '"') if others else ""
            return f"{', '.join(kept)} can't be given back: {self._kept[kept[0]]}{advice}"
        if self._scheduler.draining:
            return "the instance is draining, and gives everything back as it ends"
        if order.wait_s <= 0 and not self._is_quiet:
            return f"{self._running()}; wait for them (wait_s), abort them, or drain the instance"
        return None

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing computes, and no hand-over has memory of this instance."""
        return self._scheduler.is_idle and not self._scheduler.handovers.pinned()

    def _running(self) -> str:
        count = len(self._scheduler.reqs)
        return f"{count} requests are running or queued" if count else "hand-overs or steps are not over"

    def _release(self) -> None:
        scheduler = self._scheduler
        if "kv_cache" in self._tags:
            dropped = scheduler.memory.empty()
            log.info("prefix cache emptied: %d tokens dropped", dropped)
            # Pages are saved before their memory goes: the worker keeps the order of messages.
            scheduler.outbox.all_to_worker(scheduler.tiers.copies.take_before())
        self._tell_worker(ReleaseMemory(self._tags), MemoryState.RELEASING)

    def _tell_worker(self, command: ReleaseMemory | ResumeMemory, state: MemoryState) -> None:
        self.state, self._until = state, math.inf
        self._scheduler.outbox.to_worker(command)

    def _stay(self, order: MemoryReq, why: str) -> None:
        """Undo the release that is under way, let peers connect again, and refuse its order with 409 and the reason
        ``why``.
        """
        self._order = None
        self.state, self._until = MemoryState.HELD, math.inf
        self._scheduler.handovers.membership.open()
        self._answer(order, RefusedAnswer(409, why))

    def _answer(self, order: MemoryReq, result: MemoryResult | RefusedAnswer) -> None:
        if isinstance(result, RefusedAnswer):
            log.info("memory stays as it is (%s): %s", ORDERS[order.release], result.text)
        self._scheduler.outbox.reply(order, result)


METRICS: Metrics[MemorySaver] = (
    gauge(
        "pdserve_memory_released",
        "1 for memory that was given back, which makes the instance unready.",
        lambda o: {tag: int(tag in o.released) for tag in ALL_TAGS},
        "tag",
        note="Tags: `kv_cache`, `weights` ([requests for it](http-api.md#post-release_memory_occupation)).",
    ),
)
