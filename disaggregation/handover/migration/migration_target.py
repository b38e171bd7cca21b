"""Migration of running requests from another instance, from its ``MoveOffer`` until they run here.

    receiving (its KV is on the way: ``receiver_table.py``) → ready (the other instance is notified) → (it runs)

When such a request begins to run, no client is connected for it yet. The HTTP process keeps its answer for the client
that brings the key.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from ....messages.base import REASON_CHARS, HandoverId, unpack_i32
from ....messages.decode import shown
from ....messages.moves import (
    MoveCommit,
    MoveOffer,
    MoveReady,
    MoveRefused,
    MoveTaken,
    ReqArrived,
    problem_of,
    tokens_problem,
)
from ....messages.outputs import Timing
from ....runtime.answer_keys import AnswerKeys
from ....scheduler.req import Req, ReqState
from ....scheduler.scheduler import Scheduler
from ..incoming_prompts import is_sound
from ..kv_receiver import KVReceiver
from ..limits import HandoverLimits
from ..peer import Peer
from ..peer_dispatcher import Handlers
from ..peers import Peers
from ..receiver_table import ReceiverTable

log = logging.getLogger(__name__)

SUFFIX = re.compile(r"@[0-9a-f]{16}$")
"""Suffix in the ids of requests that have migrated before."""
READY_SECONDS = 30.0
"""Time limit in seconds for the other instance to commit a request that is ready here."""
MAX_ARRIVALS = 4096
"""Maximum number of requests that are on their way to this instance."""


@dataclass(slots=True, eq=False)
class Arrival:
    """State of one request that another instance has offered."""

    req: Req
    peer: Peer
    handover: HandoverId
    since: float
    keep: bool = False
    """Whether this is a KV return: the request has finished, and its KV is kept for other requests."""
    ready: bool = False
    """Whether the request can run here, and the other instance is notified."""
    deadline: float = 0.0
    """Latest time of its ``MoveCommit``. Set with ``ready``."""


class MigrationTarget:
    """Owner of all migrations from other instances, until the request runs here."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: HandoverLimits,
        peers: Peers,
        receivers: ReceiverTable,
        port: int,
        answer_keys: AnswerKeys,
        *,
        knows_peers: bool,
    ) -> None:
        self._knows_peers = knows_peers
        self._scheduler = scheduler
        self._page_size = scheduler.options.page_size
        self._vocab_size = scheduler.worker.vocab_size
        self._limits = limits
        self._peers = peers
        self._receivers = receivers
        self._port = port
        self._answer_keys = answer_keys
        self._arrivals: dict[HandoverId, Arrival] = {}
        self._by_req: dict[Req, Arrival] = {}
        self._now = 0.0
        self.done = 0
        self.failed = 0
        self.kept = 0

    def handlers(self) -> Handlers:
        """Return the handlers of the messages that the sources of migrations send."""
        return {MoveOffer: self.on_offer, MoveCommit: self.on_commit, MoveRefused: self.on_refused}

    def on_offer(self, peer: Peer, msg: MoveOffer, now: float) -> None:
        """Admit a request, or a finished request's KV, that another instance offers, and ask for its KV.

        A request without KV is ready to run at once. If it is refused, the other instance is told why.
        """
        self._now = now
        problem = self._problem(msg)
        taken: Req | str = problem if problem is not None else self._admit(peer, msg, now)
        if isinstance(taken, str):
            self._refuse(peer, msg.handover, taken)
            return
        arrival = Arrival(taken, peer, msg.handover, now, msg.keep)
        self._arrivals[msg.handover] = self._by_req[taken] = arrival
        level = logging.DEBUG if msg.keep else logging.INFO
        log.log(level, "instance %s offers it, after %d tokens", peer.epoch, taken.output_len, extra={"rid": taken.rid})
        if msg.kv_len:
            self._peers.want(peer, now)
            self._receivers.add_migrating(taken, peer, msg.handover, msg.kv_len, self, now)
        else:
            self._when_ready(arrival)

    def _problem(self, msg: MoveOffer) -> str | None:
        if msg.handover in self._arrivals or msg.handover.room in self._receivers.rooms:
            return f"room {msg.handover.room} is in use"
        if len(self._arrivals) >= MAX_ARRIVALS:
            return f"{MAX_ARRIVALS} requests are on their way already"
        problem = problem_of(msg.running, self._vocab_size)
        if problem is not None:
            return problem
        known = (len(msg.running.request.input_ids) + len(msg.running.output)) // 4
        if msg.keep and not self._knows_peers:
            return "KV is kept for others only of instances with the same cluster secret"
        if msg.keep and (msg.kv_len != known or msg.running.output):
            return "it is over, and has more tokens than KV"
        if msg.kv_len % self._page_size or msg.kv_len > known:
            return f"{msg.kv_len} tokens of KV are no whole pages of its {known} tokens"
        return None

    def _admit(self, peer: Peer, msg: MoveOffer, now: float) -> Req | str:
        running = msg.running
        # An intact transfer does not prove that the KV is right. Without a cluster secret any process may be a peer, so
        # only requests from the same peer share it.
        source = "" if self._knows_peers else f"\0{peer.epoch}"
        request = msgspec.structs.replace(
            running.request,
            # The id that it has there may be in use here.
            rid=f"{SUFFIX.sub('', running.request.rid)}@{msg.handover.room:016x}",
            place=0,
            extra_key=running.request.extra_key + source,
            arrival=now - running.age,
            bootstrap=None,
        )
        if msg.keep:
            return self._scheduler.arrivals.admit_kv_return(request)
        return self._scheduler.arrivals.admit_moved(request, unpack_i32(running.output), running.max_new_tokens)

    # --- KVConsumer ---

    def on_allocated(self, receiver: KVReceiver) -> None:
        """Do nothing: the request's look-up in the prefix cache was counted by the instance that it comes from."""

    def landed(self, receiver: KVReceiver, there: Timing, now: float) -> None:
        """Tell the other instance that its request, the KV of which is here and verified, can run here (``MoveReady``).

        If the KV of a finished request came back, keep it in the prefix cache and end its request instead. ``there`` is
        not used.
        """
        req = receiver.req
        req.computed = receiver.length
        arrival = self._by_req.get(req)
        if arrival is None:
            return
        if not arrival.keep:
            self._when_ready(arrival)
            return
        self._remove(arrival)
        self.kept += 1
        self._scheduler.leave(req, ReqState.MOVED)

    def lost(self, receiver: KVReceiver, status: int, reason: str, now: float) -> None:
        """Drop the arriving request because its KV will not come, and send ``MoveRefused`` to the other instance.

        A migrating request continues there. Do nothing if the request is no arrival any more. ``status`` is not used.
        """
        arrival = self._by_req.get(receiver.req)
        if arrival is not None:
            self._forget(arrival, reason, tell=True)

    def _when_ready(self, arrival: Arrival) -> None:
        arrival.ready, arrival.deadline = True, self._now + READY_SECONDS
        arrival.peer.send(MoveReady(arrival.peer.epoch, arrival.handover))

    # --- the other instance goes on ---

    def on_commit(self, peer: Peer, msg: MoveCommit, now: float) -> None:
        """Start a request that is paused at the other instance, with the rest of its state, and confirm that.

        If its state is invalid, or the request is not known or not ready here, refuse it: it then continues there.
        """
        self._now = now
        arrival = self._of(peer, msg.handover)
        if arrival is None or not arrival.ready:
            self._refuse(peer, msg.handover, "it is not known here")
            return
        req = arrival.req
        problem = self._commit_problem(req, msg)
        if problem is not None:
            self._drop(arrival, problem)
            return
        self._remove(arrival)
        self.done += 1
        req.extend(unpack_i32(msg.output))
        req.cached_tokens, req.retractions = min(msg.cached_tokens, req.prompt_len), msg.retractions
        req.timing, req.cached_beyond = msg.timing, msg.cached_beyond
        req.times.arrival = req.phases.take_over(msg.timing.phases, req.times.arrival, now)
        if req.output_len:
            req.times.first_token = now - msg.first_token_age
            req.times.admitted = req.times.arrival
        if req.msg.logprobs is not None:
            req.logprobs = msg.logprobs
        if req.wants_input_logprobs and req.output_len:
            req.input_logprobs = msg.input_logprobs
        key = self._answer_keys.draw()
        self._scheduler.outbox.answer(ReqArrived(req.rid, key, req.times.arrival, req.output_len))
        peer.send(MoveTaken(peer.epoch, msg.handover, key, self._port))
        self._scheduler.peer_requests.start_moved(req, now)

    def _commit_problem(self, req: Req, msg: MoveCommit) -> str | None:
        if problem := tokens_problem("output", msg.output, self._vocab_size):
            return problem
        output_len = req.output_len + len(msg.output) // 4
        if req.hold is not None and req.prompt_len + output_len <= req.computed:
            return "nothing of it is left to compute"
        if output_len >= req.max_new_tokens:
            return "it has all of its output"
        if len(msg.logprobs) != (output_len if req.msg.logprobs is not None else 0):
            return "its logprobs are not those of its output"
        scores = msg.input_logprobs or []
        if len(scores) > req.prompt_len or not all(
            is_sound(score, self._vocab_size) for score in [*scores, *msg.logprobs]
        ):
            return "its logprobs are none"
        return None

    # --- the ways out ---

    def on_refused(self, peer: Peer, msg: MoveRefused, now: float) -> None:
        """Drop an arriving request, since the other instance keeps it or it has ended there."""
        arrival = self._of(peer, msg.handover)
        if arrival is not None:
            self._drop(arrival, shown(msg.reason, REASON_CHARS), tell=False)

    def on_gone(self, peer: Peer) -> None:
        """Drop all requests that are arriving from ``peer``, an instance that is gone."""
        for arrival in [a for a in self._arrivals.values() if a.peer is peer]:
            self._drop(arrival, f"the other instance is gone: {peer.reason}", tell=False)

    def cancel(self, req: Req, reason: str) -> None:
        """Drop an arriving request that has ended here for ``reason``, and tell the other instance."""
        arrival = self._by_req.get(req)
        if arrival is not None:
            self._drop(arrival, reason)

    def advance(self, now: float) -> None:
        """Drop requests that are ready here and that the other instance did not commit by their deadline."""
        self._now = now
        for arrival in [a for a in self._arrivals.values() if a.ready and now > a.deadline]:
            self._drop(arrival, f"it was not let go of within {READY_SECONDS:.0f} s")

    def _drop(self, arrival: Arrival, reason: str, *, tell: bool = True) -> None:
        self._forget(arrival, reason, tell=tell)
        self._receivers.cancel(arrival.req, reason)

    def _forget(self, arrival: Arrival, reason: str, *, tell: bool) -> None:
        """End an arriving request, which does not run here. ``tell``: send the other instance ``reason``.

        The other processes of this instance have not heard of the request.
        """
        self._remove(arrival)
        self.failed += not arrival.keep
        req = arrival.req
        level = logging.DEBUG if arrival.keep else logging.INFO
        log.log(level, "it does not go on here: %s", reason, extra={"rid": req.rid})
        if not req.is_ended:
            self._scheduler.leave(req, ReqState.MOVED)
        if tell:
            self._refuse(arrival.peer, arrival.handover, reason)

    @staticmethod
    def _refuse(peer: Peer, handover: HandoverId, reason: str) -> None:
        peer.send(MoveRefused(peer.epoch, handover, shown(reason, REASON_CHARS)))

    def _of(self, peer: Peer, handover: HandoverId) -> Arrival | None:
        arrival = self._arrivals.get(handover)
        return arrival if arrival is not None and arrival.peer is peer else None

    def _remove(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.handover], self._by_req[arrival.req]

    def info(self, now: float) -> list[dict[str, Any]]:
        """Return the requests that are ready to run here, for ``/transfers``. ``ReceiverTable`` lists the others."""
        return [
            {
                "direction": "arriving",
                "room": arrival.handover.room,
                "state": "ready",
                "rid": arrival.req.rid,
                "peer": arrival.peer.epoch or None,
                "seconds": round(now - arrival.since, 3),
                "prompt_tokens": arrival.req.prompt_len,
                "reason": None,
            }
            for arrival in self._arrivals.values()
            if arrival.ready
        ]
