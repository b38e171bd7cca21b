"""A scene of three instances with pools that are too small for the requests that they hand over to each other.

Requests wait for memory here, reservations stall and are given back (``scheduler/claims.py``), and priorities decide.
Links between the instances are open from the start, and no fault happens.

Time is a part of the scene, because a reservation is asked back only after a while. Messages between instances count as
quicker than that. The clock moves on only when none is under way, to the next moment at which a reservation may be
asked back. Clients may take any time: their messages arrive before or after that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from pdserve.messages.outputs import ReqError
from pdserve.messages.requests import Bootstrap
from pdserve.scheduler.claims import STALL_SECONDS
from pdserve.scheduler.req import Req, Route, hold_of
from pdserve.scheduler.reservations import Reservation
from support.sim import make_generate, make_options, reference_output
from support.world.node import HOST, Node
from support.world.signature import signature
from support.world.two_rooms import OPTIONS, PORT
from support.world.world import Channel, Violation, World

LATER = 1e-3
"""Seconds by which the clock passes a moment, so that rounding doesn't matter."""
APART = 1e-6
"""Seconds between two arrivals at an instance."""
MOST_GIVEN_BACK = 3
"""How often a request of these scenes may give its memory back. None needs as many."""
INSIDE = ("transfer", "events", "data")
"""Channels with messages that arrive at once unless a scene defers them: commands to a transfer engine, events from a
worker, pages.
"""


class HandedOver(NamedTuple):
    """A request. Instance number ``sender`` computes its prompt for instance number ``receiver``.

    ``awaited``: the receiver has it from the start.
    """

    sender: int
    receiver: int
    prompt_len: int = 3
    output: int = 2
    priority: int = 0
    awaited: bool = False


class CrowdedRooms:
    """See ``Scene``.

    ``modes`` and ``pools`` (tokens): one of each instance. ``requests``: named r0, r1, ... in this order. ``at_once``:
    kinds of channels in which nothing is ever under way. ``seen``: counts the states in which something is the case
    that makes the scene worth exploring.
    """

    def __init__(
        self,
        modes: tuple[str, ...],
        pools: tuple[int, ...],
        requests: tuple[HandedOver, ...],
        seen: Counter[str],
        *,
        at_once: tuple[str, ...] = INSIDE,
    ) -> None:
        self.world = World()
        self._seen = seen
        self._at_once = at_once
        self._requests = {f"r{i}": request for i, request in enumerate(requests)}
        self.nodes = [self._node(i, mode, pool) for i, (mode, pool) in enumerate(zip(modes, pools, strict=True))]
        for request in requests:
            self.nodes[request.receiver].manager._peers.peer_at(HOST, PORT + request.sender, self.world.now)
            self.nodes[request.receiver].turn()
        while ready := self.world.ready():
            self.world.step(ready[0])
        for i, (rid, request) in enumerate(self._requests.items()):
            self._submit(rid, request, room=70 + i)
        self._touched: set[str] = set()
        """Instances that the last move has changed."""
        for rid, request in self._requests.items():
            if request.awaited:
                self.world.step(("client", rid, self.nodes[request.receiver].epoch))
        self._go_on_inside()
        self._hears = {
            connection.channel(1 - side): node.epoch
            for node in self.nodes
            for connection, side in node.network.port.connections
        }
        """Instance at the other end of a control connection, by channel."""
        self._reserved: list[set[str]] = [set() for _ in self.nodes]

    # --- Scene ---

    def moves(self) -> list[str]:
        """See ``Scene``."""
        moves = [self._describe(channel) for channel in self.world.ready()]
        return [*moves, "time passes"] if self._next_moment() < math.inf else moves

    def make(self, move: int) -> None:
        """See ``Scene``."""
        self.make_and_tell(move)

    def make_and_tell(self, move: int) -> frozenset[str]:
        """See ``PartialScene``."""
        self._reserved = [set(node.scheduler.planner.claims.reservations) for node in self.nodes]
        self._touched = set()
        ready = self.world.ready()
        if move < len(ready):
            self._step(ready[move])
        else:
            self._touched = {node.epoch for node in self.nodes}
            then, self.world.now = self.world.now, self._next_moment() + LATER
            for node in self.nodes:
                if any(at <= self.world.now for at in _moments(node, then)):
                    node.turn()
        self._go_on_inside()
        return frozenset(self._touched)

    def signature(self) -> int:
        """See ``Scene``."""
        return signature(self.world, self.nodes, str([self._times_of(node) for node in self.nodes]))

    def check(self, *, over: bool) -> None:
        """See ``Scene``."""
        for node, before in zip(self.nodes, self._reserved, strict=True):
            node.check()
            self._check_limit(node, before)
            self._check_order(node)
        self._note()
        if self._is_at_rest():
            for node in self.nodes:
                self._check_claims(node)
            if self._next_moment() == math.inf:
                self._check_served()
        if over:
            self._check_end()

    # --- what it is made of ---

    def _node(self, i: int, mode: str, pool: int) -> Node:
        has_priorities = any(request.priority for request in self._requests.values())
        options = OPTIONS | {"disaggregation_mode": mode, "max_total_tokens": pool, "chunked_prefill_size": 8}
        options |= {"enable_priority_scheduling": has_priorities}
        node = Node(self.world, "abc"[i], PORT + i, make_options(**options), foresees=lambda req: 0.0)
        node.computes_in_no_time = True
        node.manager.on_first_token = lambda req, now: None  # type: ignore[method-assign]  # what is learned decides nothing
        return node

    def _submit(self, rid: str, request: HandedOver, room: int) -> None:
        prompt = [10 * room + i for i in range(request.prompt_len)]
        prompt = [token % 97 for token in prompt]
        self.world.answers[rid] = reference_output(prompt, request.output)
        for i in (request.sender, request.receiver):
            node = self.nodes[i]
            msg = make_generate(rid, prompt, room=room, max_new_tokens=request.output)
            bootstrap = Bootstrap(HOST, PORT + request.sender, room)

            def submit(node: Node = node, msg=msg, bootstrap: Bootstrap = bootstrap) -> None:
                arrival = self.world.now - APART * (len(self._requests) - len(node.arrivals))
                node.admit(
                    msgspec.structs.replace(msg, bootstrap=bootstrap, priority=request.priority, arrival=arrival)
                )
                node.arrivals[rid] = arrival

            self.world.post(("client", rid, node.epoch), f"{node.epoch} gets {rid}", submit)

    def _go_on_inside(self) -> None:
        # In an order that doesn't depend on how the state was reached.
        while ready := [channel for channel in self.world.ready() if channel[0] in self._at_once]:
            self._step(min(ready, key=repr))
        for node in self.nodes:
            _wipe(node)

    def _step(self, channel: Channel) -> None:
        self._touched |= self._parties(channel)
        self.world.step(channel)

    def _describe(self, channel: Channel) -> str:
        """Return what tells the move from all others: an instance may say the same to several."""
        what = self.world.channels[channel][0].what
        if channel[0] == "control":
            return f"{what} to {self._hears[channel]}"
        return f"{what} by link {channel[1]}" if channel[0] == "data" else what

    def _parties(self, channel: Channel) -> set[str]:
        """Return the instances with a state that changes when the oldest message of a channel arrives."""
        if channel[0] == "control":
            return {self._hears[channel]}
        if channel[0] == "data":
            return {
                node.epoch for node in self.nodes if any(link.number == channel[1] for link in node.backend.links())
            }
        return {str(channel[-1])}

    def _is_at_rest(self) -> bool:
        """Return whether nothing is under way except messages of clients."""
        return all(channel[0] == "client" for channel in self.world.channels)

    def _next_moment(self) -> float:
        """Return when time makes a difference next, infinity where it doesn't or messages are under way."""
        if not self._is_at_rest():
            return math.inf
        now = self.world.now
        return min((at for node in self.nodes for at in _moments(node, now)), default=math.inf)

    def _times_of(self, node: Node) -> list[object]:
        """Return what the clocks of an instance decide in future; ``signature`` leaves times out."""
        now, claims = self.world.now, node.scheduler.planner.claims
        ages = [
            (rid, round(min(now - one.since, max(one.patience, STALL_SECONDS)) if one.since < math.inf else -1.0, 3))
            for rid, one in claims.reservations.items()
        ]
        held = round(max(0.0, claims._held_until - now), 3) if claims._held_for is not None else 0.0
        # The order of arrival decides among requests of one rank only.
        order = sorted((req.msg.priority, req.times.fcfs_time, rid) for rid, req in node.scheduler.reqs.items())
        return [
            sorted(ages),
            held,
            [(priority, rid) for priority, _, rid in order],
            sorted(node.open),
            sorted(node.tokens.items()),
            sorted(claims._revocations.counts.items()),
        ]

    # --- what must hold ---

    def _note(self) -> None:
        for node in self.nodes:
            waiting = node.scheduler.planner.waiting.order()
            pool = node.scheduler.memory.pool
            self._seen["waits for memory"] += any(pool.pages_up(r.known_len) > pool.obtainable for r in waiting)
            self._seen["given back"] += node.manager.receivers.withdrawn > 0
        messages = [happening.what for waiting in self.world.channels.values() for happening in waiting]
        self._seen["asked back too late"] += any(what.endswith("Withdraw") for what in messages) and any(
            one.begun or not node.manager.receivers._rooms.of(one.req).awaits_first_token
            for node in self.nodes
            for one in _reservations(node)
        )

    def _check_limit(self, node: Node, before: set[str]) -> None:
        """Check the transfer limit for the reservations that were made since ``before``."""
        planner, memory = node.scheduler.planner, node.scheduler.memory
        outgoing = [r.prompt_len for r in node.scheduler.reqs.values() if r.route is Route.OUTGOING]
        waits = [one.req.prompt_len for one in _reservations(node) if not one.begun]
        if outgoing and len(waits) > 1 and planner.claims.reservations.keys() - before:
            tokens = sum(map(memory.pool.pages_up, [*waits, max(outgoing)]))
            if tokens > memory.pool.max_total_tokens:
                raise Violation(f"{node.epoch}: reservations and an outgoing request need {tokens} tokens")

    def _check_order(self, node: Node) -> None:
        """Check that no request gives memory back for one of equal or lower rank, or again and again."""
        claims = node.scheduler.planner.claims
        for one in _reservations(node):
            other = claims._yields.get(one.req.rid) if one.asked_back else None
            if other is None or other.route is not Route.INCOMING:
                continue
            if other.msg.priority <= one.req.msg.priority:
                raise Violation(f"{node.epoch}: {one.req.rid} is asked back for {other.rid}, whose rank isn't higher")
        if max(claims._revocations.counts.values(), default=0) > MOST_GIVEN_BACK:
            raise Violation(f"{node.epoch}: requests give their memory back in circles: {claims._revocations.counts}")

    def _check_claims(self, node: Node) -> None:
        """Check that a waiting request lacks memory, and not because of a stalled reservation of lower rank."""
        memory, first = node.scheduler.memory, _first(node)
        if first is None:
            return
        needed = memory.pool.pages_up(first.known_len)
        if needed <= memory.pool.obtainable:
            raise Violation(f"{node.epoch}: {first.rid} waits though {memory.pool.obtainable} tokens can be had")
        reservations = _reservations(node)
        below = [one for one in reservations if one.req.msg.priority < first.msg.priority and not one.begun]
        given = sum(memory.pool.pages_up(hold_of(one.req).kv_len) for one in below)
        has_stalled = all(self.world.now - one.since >= STALL_SECONDS for one in below)
        if needed <= memory.pool.obtainable + given and has_stalled and not any(one.asked_back for one in below):
            rids = [one.req.rid for one in below]
            raise Violation(f"{node.epoch}: {first.rid} waits for the reservations of {rids}, whose rank is lower")

    def _check_served(self) -> None:
        """Check that only requests of low rank are left when nothing can happen by itself."""
        late = {str(channel[1]) for channel in self.world.channels}
        most = max((self._requests[rid].priority for rid in late), default=-1)
        for rid, request in self._requests.items():
            if rid not in late and request.priority > most:
                for i in (request.sender, request.receiver):
                    if rid in self.nodes[i].open:
                        raise Violation(f"{rid} is never served; clients that are late, of lower rank: {sorted(late)}")

    def _check_end(self) -> None:
        if self.world.channels:
            stuck = [waiting[0].what for waiting in self.world.channels.values()]
            raise Violation(f"for ever stuck: {stuck}")
        for node in self.nodes:
            node.check_quiet()
            if node.mismatches:
                raise Violation(f"{node.epoch}: KV that landed was not what was sent")
        for rid, request in self._requests.items():
            for i in (request.sender, request.receiver):
                end = self.world.ends[self.nodes[i].epoch, rid]
                if isinstance(end, ReqError):
                    raise Violation(f"{self.nodes[i].epoch}: {rid} failed: {end.message}")


def _wipe(node: Node) -> None:
    """Forget which free pages and rows were used last, and set what they hold to zeros."""
    memory = node.scheduler.memory
    allocator, rows = memory.pool.allocator, memory.pool.table
    free, size = np.sort(allocator.free_pages())[::-1], allocator.page_size
    allocator._stack[:] = 0
    allocator._stack[: len(free)] = free
    for page in free.tolist():
        node.sim_worker.kv[page * size : (page + 1) * size] = 0
    rows._free.sort(reverse=True)
    used = {hold.row: hold.kv_len for hold in memory.pool.holds}
    for row in range(rows.max_reqs):
        rows.table[row, used.get(row, 0) :] = 0


def _moments(node: Node, now: float) -> Iterator[float]:
    """Yield the later times at which a tick of the instance may do something that it doesn't do before."""
    claims = node.scheduler.planner.claims
    reservations: list[Reservation] = [one for one in _reservations(node) if one.since < math.inf]
    moments = [
        one.since + seconds for one in reservations for seconds in (STALL_SECONDS, one.patience) if not one.begun
    ]
    if claims._held_for is not None:
        moments.append(claims._held_until)
    return (at for at in moments if at > now)


def _reservations(node: Node) -> list[Reservation]:
    return list(node.scheduler.planner.claims.reservations.values())


def _first(node: Node) -> Req | None:
    """Return the claim that is granted next, by the rules of ``scheduler/claims.py``."""
    planner, now = node.scheduler.planner, node.scheduler.now
    claims, memory = planner.claims, node.scheduler.memory
    has_outgoing = any(r.route is Route.OUTGOING for r in node.scheduler.reqs.values())
    unbegun = [one for one in _reservations(node) if not one.begun]
    for req in planner.waiting.order():
        yields_to = claims._yields.get(req.rid)
        if req.pending or (yields_to is not None and yields_to.rid in planner.waiting):
            continue
        if req.route is Route.INCOMING:
            if claims._held_for is not None and now < claims._held_until:
                continue
            largest = max((r.prompt_len for r in node.scheduler.reqs.values() if r.route is Route.OUTGOING), default=0)
            lengths = [one.req.prompt_len for one in unbegun] + [req.known_len, largest]
            if has_outgoing and unbegun and sum(map(memory.pool.pages_up, lengths)) > memory.pool.max_total_tokens:
                continue
        return req
    return None


class Crowd(NamedTuple):
    """What a ``CrowdedRooms`` is made of."""

    modes: tuple[str, ...]
    pools: tuple[int, ...]
    requests: tuple[HandedOver, ...]

    def stage(self, seen: Counter[str], *, awaited: bool = True, at_once: tuple[str, ...] = INSIDE) -> CrowdedRooms:
        """Return the scene at its beginning. ``awaited`` False: no instance has any of the requests yet."""
        requests = self.requests if awaited else tuple(one._replace(awaited=False) for one in self.requests)
        return CrowdedRooms(self.modes, self.pools, requests, seen, at_once=at_once)


EQUALS = ("unified",) * 3
RING = Crowd(
    EQUALS,
    (4, 4, 4),
    (HandedOver(0, 1, awaited=True), HandedOver(1, 2, awaited=True), HandedOver(2, 0, awaited=True)),
)
"""Each instance computes for the next one, and has memory for one request."""
EACH_OTHER = Crowd(
    EQUALS, (4, 8, 4), (HandedOver(0, 1, awaited=True), HandedOver(2, 1), HandedOver(1, 0, awaited=True))
)
"""The second instance has memory for two requests: for one that comes, if another one is to go."""
TWO_PREFILLS = Crowd(
    ("prefill", "prefill", "decode"), (8, 8, 6), (HandedOver(0, 2, 4), HandedOver(1, 2, 4, priority=100))
)
"""The decode has memory for one of the two requests, which differ in rank."""
TWO_DECODES = Crowd(
    ("prefill", "decode", "decode"),
    (4, 4, 4),
    (HandedOver(0, 1, awaited=True), HandedOver(0, 2, priority=1, awaited=True), HandedOver(0, 1, priority=2)),
)
"""All three instances have memory for one request. Two requests of different rank go to the same decode."""
CROWDS = {"ring": RING, "each other": EACH_OTHER, "two prefills": TWO_PREFILLS, "two decodes": TWO_DECODES}
