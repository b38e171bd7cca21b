"""The decode's side of hand-overs.

A ``KVReceiver`` is one room::

    LINKING → QUEUED → PREALLOCATED → TRANSFERRING → VERIFYING → (the request runs)
                                          └──────────────┴──▶ DRAINING → (memory freed)

LINKING waits for the prefill instance to be connected, QUEUED for memory, PREALLOCATED for the steps that were under
way when its pages were taken: they may still write to them (see ``scheduler/kv_memory.py``), and a remote writer must
come after. DRAINING is a room that ended while the prefill may still write: its pages are freed only when the prefill
has said that it will not, or its link is down for good. While our own worker checks what landed, which may rewrite it
in our order, only the worker's answer frees them. Bad KV (checksum, room, epoch) never reaches the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from ..messages.base import REASON_CHARS, pack_i32
from ..messages.decode import shown
from ..messages.handover import (
    MAX_PAGES,
    Abort,
    AuxData,
    RoomQueued,
    TransferDone,
    TransferFailed,
    TransferRequest,
)
from ..messages.worker import PagesVerified, VerifyPages
from ..scheduler.req import Req, ReqState
from .handover_host import HandoverHost
from .kv_sender import prompt_digest
from .prefill_link import LinkState, PrefillLink

log = logging.getLogger(__name__)

OVERTAKING_SECONDS = 2.0
"""How long a big prompt that does not fit lets smaller ones pass it."""


MOST_OVERTAKEN = 4
"""How many that do not fit are passed over in one turn: each try costs a walk of the prefix tree."""


class ReceiverState(Enum):
    """Where a room stands; see the module."""

    LINKING = auto()
    QUEUED = auto()
    PREALLOCATED = auto()
    TRANSFERRING = auto()
    VERIFYING = auto()
    DRAINING = auto()


@dataclass(slots=True, eq=False)
class KVReceiver:
    """One room.

    ``fence``: the step that must be done before its pages are offered to the prefill. ``checking``: the worker has its
    pages, to check and perhaps to convert them.
    """

    room: int
    req: Req
    link: PrefillLink
    state: ReceiverState
    deadline: float
    queued_at: float = 0.0
    fence: int = 0
    prefix_len: int = 0
    requested_at: float = 0.0
    aux: AuxData | None = None
    checking: bool = False


class KVReceivers:
    """Owner of all rooms of a decode instance, and of their requests' memory until they run."""

    def __init__(
        self,
        host: HandoverHost,
        page_size: int,
        bootstrap_timeout: float,
        transfer_timeout: float,
        link_to: Callable[[str, int, float], PrefillLink],
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._host = host
        self._page_size = page_size
        self._bootstrap_timeout = bootstrap_timeout
        self._transfer_timeout = transfer_timeout
        self._link_to = link_to
        self.rooms: dict[int, KVReceiver] = {}
        self.done = 0
        self.failed = 0
        self.bytes_received = 0

    def add(self, req: Req, now: float) -> None:
        """A client's request whose prompt a prefill instance computes."""
        where = req.msg.bootstrap
        assert where is not None
        if where.room in self.rooms:
            text = f"bootstrap_room {where.room} is in use; draw a fresh one for every request"
            self._host.fail(req, 400, text, "invalid_request_error")
            return
        link = self._link_to(where.host, where.port, now)
        deadline = now + self._bootstrap_timeout
        self.rooms[where.room] = KVReceiver(where.room, req, link, ReceiverState.LINKING, deadline)

    def advance(self, now: float) -> None:
        """Move every room on that can move; give up those that waited too long."""
        for receiver in list(self.rooms.values()):
            if receiver.state is ReceiverState.LINKING:
                self._when_linked(receiver, now)
            if receiver.state not in (ReceiverState.QUEUED, ReceiverState.DRAINING) and now > receiver.deadline:
                self._time_out(receiver)
        self._preallocate(now)
        for receiver in self._in(ReceiverState.PREALLOCATED):
            if self._host.completed_step >= receiver.fence:
                self._request(receiver, now)

    def _when_linked(self, receiver: KVReceiver, now: float) -> None:
        link = receiver.link
        if link.state is LinkState.GONE:
            self._fail(receiver, link.status, link.reason)
        elif link.state is LinkState.READY:
            receiver.state, receiver.queued_at = ReceiverState.QUEUED, now
            link.send(RoomQueued(link.peer_epoch, receiver.room))

    def _preallocate(self, now: float) -> None:
        holders = [r.req for r in self.rooms.values() if r.req.hold is not None and not r.req.is_ended]
        misfits = 0
        for receiver in self._in(ReceiverState.QUEUED):
            if self._host.admit_incoming(receiver.req, holders):
                receiver.state, receiver.req.state = ReceiverState.PREALLOCATED, ReqState.PREALLOCATED
                receiver.fence = self._host.last_step_id
                receiver.prefix_len = receiver.req.computed
                receiver.deadline = now + self._transfer_timeout
                holders.append(receiver.req)
                continue
            misfits += 1
            if misfits > MOST_OVERTAKEN or now - receiver.queued_at > OVERTAKING_SECONDS:
                return

    def _request(self, receiver: KVReceiver, now: float) -> None:
        req, link = receiver.req, receiver.link
        pages = self._host.pages(req, receiver.prefix_len, req.prompt_len)
        if len(pages) > MAX_PAGES:
            text = f"the prompt needs {len(pages)} KV pages, a hand-over can name {MAX_PAGES}; use a larger --page-size"
            self._fail(receiver, 400, text)
            return
        receiver.state, req.state = ReceiverState.TRANSFERRING, ReqState.TRANSFERRING
        receiver.requested_at = now
        link.send(
            TransferRequest(
                link.peer_epoch, receiver.room, req.prompt_len, prompt_digest(req), receiver.prefix_len, pack_i32(pages)
            )
        )

    # --- the prefill answers ---

    def on_done(self, link: PrefillLink, msg: TransferDone) -> None:
        """All pages have landed, says the prefill: check that they are what it sent."""
        receiver = self._known(link, msg.room)
        if receiver is None:
            return
        if receiver.state is ReceiverState.DRAINING:
            self._drained(receiver)
        elif receiver.state is ReceiverState.TRANSFERRING:
            receiver.state, receiver.aux, receiver.checking = ReceiverState.VERIFYING, msg.aux, True
            pages = self._host.pages(receiver.req, receiver.prefix_len, receiver.req.prompt_len)
            self._host.to_worker(VerifyPages(receiver.room, pack_i32(pages), msg.checksum, link.order))

    def on_verified(self, event: PagesVerified, now: float) -> None:
        """The worker has checked the landed pages."""
        receiver = self.rooms.get(event.room)
        if receiver is None or not receiver.checking:
            return
        receiver.checking = False
        if receiver.state is ReceiverState.DRAINING:
            self._drained(receiver)
            return
        if not event.ok:
            self._fail(receiver, 502, "the KV that arrived is not what the prefill instance sent (checksum mismatch)")
            return
        req, aux = receiver.req, receiver.aux
        assert aux is not None
        if not 0 <= aux.first_token < self._vocab_size:
            self._fail(receiver, 502, f"the prefill instance sent a first token that is none: {aux.first_token}")
            return
        if aux.input_logprobs is not None and len(aux.input_logprobs) > req.prompt_len:
            self._fail(receiver, 502, "the prefill instance sent more prompt logprobs than the prompt has tokens")
            return
        del self.rooms[receiver.room]
        self.done += 1
        self.bytes_received += aux.timing.transfer_bytes
        times, timing = req.times, req.timing
        total = (now - times.arrival) * 1000
        # Clocks of two hosts can't be compared, durations can: what neither side waited or computed was the hand-over.
        timing.queue_ms = (receiver.requested_at - times.arrival) * 1000 + aux.timing.queue_ms
        timing.prefill_ms = aux.timing.prefill_ms
        timing.transfer_ms = max(0.0, total - timing.queue_ms - timing.prefill_ms)
        timing.transfer_bytes = aux.timing.transfer_bytes
        times.first_token = now
        req.cached_tokens, req.input_logprobs = aux.cached_tokens, aux.input_logprobs
        self._host.start_incoming(req, aux.first_token, aux.first_logprob, now)

    def on_failed(self, link: PrefillLink, msg: TransferFailed) -> None:
        """The prefill gave the room up and will write no more."""
        receiver = self._known(link, msg.room)
        if receiver is None:
            return
        if receiver.state is ReceiverState.DRAINING:
            self._drained(receiver)
        else:
            receiver.state = ReceiverState.VERIFYING  # nothing can be written any more, so nothing needs draining
            self._fail(receiver, msg.status, shown(msg.reason, REASON_CHARS))

    def on_abort_ack(self, link: PrefillLink, room: int) -> None:
        """The prefill will write no more for a room that was aborted."""
        receiver = self._known(link, room)
        if receiver is not None and receiver.state is ReceiverState.DRAINING:
            self._drained(receiver)

    # --- the ways out ---

    def cancel(self, req: Req, reason: str) -> None:
        """The request has ended on this side; free its memory when nobody writes to it any more."""
        receiver = self._of(req)
        if receiver is None:
            self._host.free(req)
        else:
            self._let_go(receiver, reason)

    def on_link_gone(self, link: PrefillLink) -> None:
        """The prefill is gone: its requests fail now; pages that it may still write wait for ``on_link_down``."""
        for receiver in [r for r in self.rooms.values() if r.link is link]:
            self._host.fail(receiver.req, link.status, link.reason, "transfer_error")
            if receiver.state in (ReceiverState.TRANSFERRING, ReceiverState.DRAINING) and not link.down:
                receiver.state = ReceiverState.DRAINING
            else:
                self._drained(receiver)

    def on_link_down(self, link: PrefillLink) -> None:
        """The worker says that this prefill can't write here any more."""
        for receiver in [r for r in self.rooms.values() if r.link is link and r.state is ReceiverState.DRAINING]:
            self._drained(receiver)

    def owns(self, req: Req) -> bool:
        """Whether the request's room is open, so that its memory is this object's to free."""
        return self._of(req) is not None

    def lingering(self) -> list[Req]:
        """Ended requests whose memory a prefill may still write."""
        return [r.req for r in self.rooms.values() if r.req.is_ended]

    def _in(self, state: ReceiverState) -> list[KVReceiver]:
        return [r for r in self.rooms.values() if r.state is state]

    def _of(self, req: Req) -> KVReceiver | None:
        if req.msg.bootstrap is None:
            return None
        receiver = self.rooms.get(req.msg.bootstrap.room)
        return receiver if receiver is not None and receiver.req is req else None

    def _known(self, link: PrefillLink, room: int) -> KVReceiver | None:
        receiver = self.rooms.get(room)
        if receiver is None or receiver.link is not link:
            # Usually the answer to an abort of a room that had nothing to drain.
            log.debug("dropped a message of %s for room %d, which is not open", link.peer_epoch, room)
            return None
        return receiver

    def _time_out(self, receiver: KVReceiver) -> None:
        where = receiver.req.msg.bootstrap
        assert where is not None
        if receiver.state is ReceiverState.LINKING:
            waited = f"{self._bootstrap_timeout:.0f} s: {receiver.link.reason or 'no answer'}"
            self._fail(
                receiver, 504, f"the prefill instance behind {where.host}:{where.port} was not reached in {waited}"
            )
        else:
            self._fail(receiver, 504, f"the hand-over took longer than {self._transfer_timeout:.0f} s")

    def _fail(self, receiver: KVReceiver, status: int, reason: str) -> None:
        log.info("room %d is off: %s", receiver.room, reason, extra={"rid": receiver.req.rid})
        self._host.fail(receiver.req, status, reason, "transfer_error")
        self._let_go(receiver, reason)

    def _let_go(self, receiver: KVReceiver, reason: str) -> None:
        link, state = receiver.link, receiver.state
        if state is ReceiverState.DRAINING:
            return
        if link.state is LinkState.READY and state in (
            ReceiverState.QUEUED,
            ReceiverState.PREALLOCATED,
            ReceiverState.TRANSFERRING,
        ):
            link.send(Abort(link.peer_epoch, receiver.room, shown(reason, REASON_CHARS)))
        if state is ReceiverState.TRANSFERRING and not link.down:
            receiver.state = ReceiverState.DRAINING
        else:
            self._drained(receiver)

    def _drained(self, receiver: KVReceiver) -> None:
        """No peer writes to its memory any more: free it, unless our own worker still may."""
        if receiver.checking:
            receiver.state = ReceiverState.DRAINING
            return
        del self.rooms[receiver.room]
        self.failed += 1
        # What landed was never verified, so none of it may be cached.
        self._host.free(receiver.req, keep_prefix=False)
