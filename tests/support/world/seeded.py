"""Mistakes in the hand-over, each made on purpose, to see that the search finds it.

Each names the scene that shows it: of ``TwoRooms`` or, for memory that requests wait for, of ``crowded.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdserve.disaggregation.handover.prompt_pushes import PromptPushes
from pdserve.disaggregation.handover.receiver_queue import ReceiverQueue
from pdserve.disaggregation.handover.receiver_rooms import ReceiverRooms
from pdserve.disaggregation.handover.receiver_table import ReceiverTable
from pdserve.disaggregation.handover.sender_rooms import SenderRooms
from pdserve.disaggregation.handover.unclaimed_rooms import Tombstones
from pdserve.disaggregation.transfer.backends.base import LinkDown
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.page_run import PageRun
from pdserve.mem_cache.pool_end import PoolEnd
from pdserve.messages.handover import Withdrawn
from pdserve.messages.memory import TrimPool
from pdserve.messages.worker import ForwardStep, GrantPages, SendEnded
from pdserve.scheduler.claims import Claims
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.peer_requests import PeerRequests
from pdserve.scheduler.pinned_memory import PinnedMemory
from pdserve.scheduler.req import Req
from pdserve.scheduler.reservations import TransferLimit
from pdserve.scheduler.scheduler import Scheduler
from support.sim import NO_WINDOW, SimWindow

Patch = pytest.MonkeyPatch


def pages_freed_at_abort(patch: Patch) -> None:
    """Let the decode free pages that the prefill may still write."""
    patch.setattr(ReceiverRooms, "begin_draining", lambda self, receiver, now: self.close(receiver))


def sender_lets_go_too_soon(patch: Patch) -> None:
    """Let the prefill give a room up without waiting for its worker to stop."""
    original = SenderRooms.drain

    def drain(self: SenderRooms, sender: Any, status: int, reason: str) -> None:
        if sender.transfer is not None and sender.transfer.hold is not None:
            self._scheduler.memory.pinned.unpin(sender.transfer.hold)
            sender.transfer.hold = None
        original(self, sender, status, reason)

    patch.setattr(SenderRooms, "drain", drain)


def a_room_in_use_is_opened_again(patch: Patch) -> None:
    """Let the decode forget the hand-over that has a room already."""
    original = ReceiverTable.add

    def add(self: ReceiverTable, req: Any, where: Any, now: float) -> None:
        self._rooms.by_number.pop(where.room, None)
        original(self, req, where, now)

    patch.setattr(ReceiverTable, "add", add)


def hand_overs_outlive_their_link(patch: Patch) -> None:
    """Let the transfer engine report that a link is down, but not the ends of its hand-overs."""
    original = TransferEngine._on_link

    def on_link(self: TransferEngine, event: Any) -> None:
        waiting = self._pushes._outgoing
        outgoing = dict(waiting)
        if isinstance(event, LinkDown):
            waiting.clear()
        original(self, event)
        waiting.update(outgoing)

    patch.setattr(TransferEngine, "_on_link", on_link)


def what_was_refused_is_taken(patch: Patch) -> None:
    """Let the prefill forget which attempts it has refused or ended."""
    patch.setattr(SenderRooms, "note_over", lambda self, handover: None)


def pages_offered_before_steps_are_done(patch: Patch) -> None:
    """Let the decode offer pages that a step under way still writes."""
    patch.setattr(PinnedMemory, "is_past", lambda self, fence, completed_step: True)


def checksum_is_not_looked_at(patch: Patch) -> None:
    """Accept whatever has landed without its checksum."""
    original = ReceiverTable.on_verified

    def on_verified(self: ReceiverTable, event: Any, now: float) -> None:
        original(self, msgspec.structs.replace(event, ok=True), now)

    patch.setattr(ReceiverTable, "on_verified", on_verified)


def late_legs_get_no_answer(patch: Patch) -> None:
    """Let a room that is over leave no record for the leg that comes late."""
    patch.setattr(Tombstones, "add", lambda self, room, failure, now: None)


def done_before_it_has_landed(patch: Patch) -> None:
    """Let the prefill report a complete hand-over as soon as the prompt is computed."""
    original = PromptPushes._finish_if_whole

    def finish(self: PromptPushes, sender: Any, transfer: Any) -> None:
        if transfer.computed and transfer.sent is None:
            transfer.sent = SendEnded(transfer.decode.handover)
        original(self, sender, transfer)

    patch.setattr(PromptPushes, "_finish_if_whole", finish)


def pages_pushed_before_they_are_computed(patch: Patch) -> None:
    """Pushes overtake the steps."""
    original = Outbox.to_worker

    def to_worker(self: Outbox, message: Any) -> None:
        for push in message.pushes if isinstance(message, ForwardStep) else ():
            self.to_transfer(push)
        original(self, msgspec.structs.replace(message, pushes=[]) if isinstance(message, ForwardStep) else message)

    patch.setattr(Outbox, "to_worker", to_worker)


def memory_goes_back_with_its_first_user(patch: Patch) -> None:
    """Let a request that ends free memory that a hand-over still uses."""
    original = PinnedMemory.unpin

    def unpin(self: PinnedMemory, hold: Any) -> None:
        if hold.left is not None:
            hold.pins = 1
        original(self, hold)

    patch.setattr(PinnedMemory, "unpin", unpin)


def window_pages_go_before_they_are_pushed(patch: Patch) -> None:
    """Let the prefill give its window pages back as soon as the prompt's last step is sent."""
    original = PromptPushes.take_computed_pages

    def take_computed_pages(self: PromptPushes, req: Any) -> Any:
        push = original(self, req)
        if push is not None and push.last:
            pool, hold = self._scheduler.memory.pool, req.hold
            pages = pool.windows._pages(pool.table.table[hold.row], hold.window.begin, hold.window.end)
            pool.windows._leave(hold.window, pages)
            for page in pages.tolist():
                pool.windows._detach(page)
        return push

    patch.setattr(PromptPushes, "take_computed_pages", take_computed_pages)


def a_window_page_is_not_granted(patch: Patch) -> None:
    """Leave out the last of the pages that a peer may write."""
    original = Outbox.to_transfer

    def to_transfer(self: Outbox, message: Any) -> None:
        if isinstance(message, GrantPages):
            message = msgspec.structs.replace(message, pages=[*message.pages[:-1], message.pages[-1][:-4]])
        original(self, message)

    patch.setattr(Outbox, "to_transfer", to_transfer)


def a_page_less_of_the_window(patch: Patch) -> None:
    """Let both sides leave out the window's first page."""
    original = PinnedMemory.run

    def run(self: PinnedMemory, start: int, end: int, goes_on: int) -> PageRun:
        found = original(self, start, end, goes_on)
        return found._replace(window=min(found.window + 1, found.end)) if found.window is not None else found

    patch.setattr(PinnedMemory, "run", run)


def the_last_window_is_not_expected(patch: Patch) -> None:
    """Let the decode have window pages for the page that it decodes in, and none before."""
    original = PinnedMemory.expect

    def expect(self: PinnedMemory, req: Any, length: int, goes_on: int) -> None:
        original(self, req, length, goes_on + self._pool.page_size)

    patch.setattr(PinnedMemory, "expect", expect)


def a_moved_window_is_not_kept(patch: Patch) -> None:
    """Let a request that moves free its window as it runs on."""
    patch.setattr(PinnedMemory, "keep_window", lambda self, hold, run: True)


def memory_goes_while_it_is_used(patch: Patch) -> None:
    """Let a smaller pool be there at once, even if pages beyond its end are in use."""
    patch.setattr(PoolEnd, "beyond", property(lambda self: 0))


def window_pages_beyond_are_forgotten(patch: Patch) -> None:
    """Let a smaller pool wait for the pages of full layers, and not for those of windows."""
    patch.setattr(PoolEnd, "beyond", property(lambda self: self._allocator.beyond))


def a_page_too_many_goes(patch: Patch) -> None:
    """Give back the memory of the pool's last page as well."""
    original = Outbox.to_worker

    def to_worker(self: Outbox, message: Any) -> None:
        original(self, TrimPool(message.first - 1) if isinstance(message, TrimPool) else message)

    patch.setattr(Outbox, "to_worker", to_worker)


def reservations_are_never_asked_back(patch: Patch) -> None:
    """Rule 2 of ``scheduler/claims.py`` is left out."""
    patch.setattr(Claims, "to_revoke", lambda self, now: [])


def rank_does_not_revoke(patch: Patch) -> None:
    """Let a claim of higher rank wait for reservations of lower rank as for those of its own."""
    original = Claims.to_revoke

    def to_revoke(self: Claims, now: float) -> list[Req]:
        with patch.context() as within:
            within.setattr(self._waiting, "rank", lambda req: 0)
            return original(self, now)

    patch.setattr(Claims, "to_revoke", to_revoke)


def any_rank_revokes(patch: Patch) -> None:
    """Let a claim revoke reservations of every rank."""
    original = Claims.to_revoke

    def to_revoke(self: Claims, now: float) -> list[Req]:
        with patch.context() as within:
            within.setattr(self._waiting, "rank", lambda req: req.rid in self.reservations)
            return original(self, now)

    patch.setattr(Claims, "to_revoke", to_revoke)


def no_transfer_limit(patch: Patch) -> None:
    """Rule 1 of ``scheduler/claims.py`` is left out."""
    patch.setattr(TransferLimit, "allows", lambda self, req, without=(): True)


def claims_do_not_yield(patch: Patch) -> None:
    """Let a claim take what it has just given back for another one."""
    patch.setattr(Claims, "_is_yielding", lambda self, req: False)
    patch.setattr(Claims, "_is_held", lambda self, now: False)


def a_withdrawn_prompt_is_computed(patch: Patch) -> None:
    """Let the prefill give a reservation back and compute the prompt all the same."""
    patch.setattr(PeerRequests, "take_back", lambda self, req: None)


def begun_is_not_heard(patch: Patch) -> None:
    """Let the decode take its memory back though the prefill has begun to use it."""
    original = ReceiverQueue.on_withdrawn

    def on_withdrawn(self: ReceiverQueue, peer: Any, msg: Withdrawn, now: float) -> None:
        original(self, peer, msgspec.structs.replace(msg, begun=False), now)

    patch.setattr(ReceiverQueue, "on_withdrawn", on_withdrawn)


def the_loop_sleeps_beside_free_memory(patch: Patch) -> None:
    """Let the memory of a preempted request wait until something else wakes the loop."""
    patch.setattr(Scheduler, "has_freed", property(lambda self: False, lambda self, value: None), raising=False)


CROWDED_MISTAKES: dict[Callable[[Patch], None], tuple[str, ...]] = {
    reservations_are_never_asked_back: ("ring", "two prefills", "two decodes"),
    rank_does_not_revoke: ("two prefills", "two decodes"),
    any_rank_revokes: ("each other", "two prefills"),
    no_transfer_limit: ("each other",),
    claims_do_not_yield: ("ring",),
    a_withdrawn_prompt_is_computed: ("ring", "each other"),
    begun_is_not_heard: ("two prefills",),
    the_loop_sleeps_beside_free_memory: ("two prefills",),
}
"""Scenes of ``crowded.py`` that show these mistakes soon."""
WINDOWED = SimWindow(3, 4)
"""Both pages are needed at once."""
MISTAKES: dict[Callable[[Patch], None], dict[str, Any]] = {
    pages_freed_at_abort: {"fault": "abort"},
    sender_lets_go_too_soon: {"fault": "abort"},
    a_room_in_use_is_opened_again: {"same": True},
    hand_overs_outlive_their_link: {"fault": "data"},
    what_was_refused_is_taken: {"fault": "abort"},
    pages_offered_before_steps_are_done: {"fault": "abort"},
    checksum_is_not_looked_at: {"fault": "corrupt"},
    late_legs_get_no_answer: {"fault": "abort"},
    done_before_it_has_landed: {},
    pages_pushed_before_they_are_computed: {},
    memory_goes_back_with_its_first_user: {"fault": "abort"},
    a_window_page_is_not_granted: {"window": WINDOWED},
    a_page_less_of_the_window: {"window": WINDOWED},
    the_last_window_is_not_expected: {"window": WINDOWED},
}
QUICKLY_FOUND = (done_before_it_has_landed, claims_do_not_yield, no_transfer_limit)
"""Mistakes that ``make test`` looks for. Those of all orders of two rooms and of three instances are among them."""
WINDOW_MISTAKES = (window_pages_go_before_they_are_pushed, a_moved_window_is_not_kept)
"""Mistakes that show if many requests share the window pages."""
RESIZE_MISTAKES: dict[Callable[[Patch], None], SimWindow] = {
    memory_goes_while_it_is_used: NO_WINDOW,
    window_pages_beyond_are_forgotten: SimWindow(10, 128),
    a_page_too_many_goes: NO_WINDOW,
}
"""Mistakes that show if pools get another size."""
