"""Random hand-overs between instances of a world, with aborts, lost legs, names used twice, and faults.

The following must hold throughout. An admitted leg ends once, with the right tokens. All memory is given back. Without
faults nothing fails.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

from pdserve.messages.memory import ResizeResult
from pdserve.messages.moves import ReqMoved
from pdserve.messages.outputs import FinishType, ReqError
from pdserve.messages.question import RefusedAnswer
from support.sim import NO_WINDOW, VOCAB, SimWindow, make_options, reference_output
from support.sim_machine import Curve
from support.world.node import Node, Stopped
from support.world.timed import Chance
from support.world.world import Channel, Violation, World

LEASE_RENEWAL = 2.0
TURN_SECONDS = 0.3
"""The loop's own, so that deadlines and heartbeats are seen."""
QUIET_SECONDS = 150.0
"""Longer than every limit of a hand-over, one after the other."""
OPTIONS = {
    "page_size": 4,
    "max_total_tokens": 192,
    "max_running_requests": 12,
    "chunked_prefill_size": 8,
    "itl_budget_ms": 0,
    "disaggregation_bootstrap_timeout": 5.0,
    "disaggregation_queue_timeout": 40.0,
    "disaggregation_transfer_timeout": 20.0,
    "handover": "on",
}
TOO_LONG = "too long for a resized pool"
"""Fate of a hand-over one leg of which was refused."""
SIZES = (104, 128, 192, 256)
"""Tokens of a pool that is resized: as many as one request needs (prompt, and 40 of output), and more."""
PAIR = ("prefill", "prefill", "decode", "decode")
EQUALS = ("unified", "unified", "unified")


@dataclass
class Slot:
    """A place where one instance after another lives."""

    mode: str
    bootstrap_port: int
    node: Node | None = None
    lives: int = 0
    frozen_until: dict[str, float] = field(default_factory=dict)
    leaving: bool = False
    """Whether its instance drains: no further leg is sent there."""


class Campaign:
    """Random hand-overs between one instance for each of ``modes``.

    ``faults``, ``moves`` of running requests, and pools that get another size (``resizes``): how many, on average, for
    a hundred hand-overs. ``outputs``: how many tokens are asked for. ``mishaps``: whether some legs are lost, some
    rooms are used twice, and some clients leave. ``machine``: see ``Node``; with it, the times of prompts are
    estimated. ``options``: of all instances, beyond ``OPTIONS``.
    """

    def __init__(
        self,
        seed: int,
        modes: tuple[str, ...],
        *,
        faults: float = 0.0,
        moves: float = 0.0,
        resizes: float = 0.0,
        outputs: tuple[int, ...] = (1, 2, 3, 6, 12),
        mishaps: bool = True,
        lets_go: bool = False,
        hostile: bool = False,
        window: SimWindow = NO_WINDOW,
        machine: Curve | None = None,
        **options: object,
    ) -> None:
        self.rng = random.Random(seed)
        self.world = World()
        self.chance = Chance(self.world, self.rng)
        self.chance.held = self._is_held
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.submitted: dict[tuple[str, str], str] = {}
        """What was done to a request that may fail it, by instance and request."""
        self._fault_rate = faults / 100
        self._move_rate = moves / 100
        self._resize_rate = resizes / 100
        self._outputs = outputs
        self._mishaps = mishaps
        self._options = options | ({"max_total_tokens_limit": max(SIZES)} if resizes else {})
        self.moves: Counter[str] = Counter()
        """How they went."""
        self._lets_go, self._hostile, self._window, self._machine = lets_go, hostile, window, machine
        self._slots = [Slot(mode, 9000 + i) for i, mode in enumerate(modes)]
        self._rids = itertools.count()
        self._rooms: list[int] = []
        self._legs: dict[int, list[tuple[str, str]]] = {}
        self._prompts: list[list[int]] = []
        self._is_calm = True
        for slot in self._slots:
            self._start(slot)

    def run(self, handovers: int, rate: float = 60.0) -> None:
        """Make ``handovers`` hand-overs, ``rate`` a second on average, and then wait for their end.

        Raises ``Violation``.
        """
        for i in range(handovers):
            self.chance.run(self.world.now + self.rng.expovariate(rate))
            self._submit()
            if self.rng.random() < self._fault_rate:
                self._fault()
            if self.rng.random() < self._move_rate:
                self._move()
            if self._resize_rate and self.rng.random() < self._resize_rate:
                self._resize()
            if i % 64 == 0:
                for node in self._nodes():
                    node.check()
        self._settle()

    def kept(self) -> int:
        """Count the KV of finished requests that living prefills have taken."""
        return sum(node.manager.moves_in.kept for node in self._nodes())

    def sizes(self) -> list[int]:
        """Return the sizes that pools of living instances have got since they began."""
        return [
            answer.max_total_tokens
            for node in self._nodes()
            for answer in node.sizes
            if isinstance(answer, ResizeResult)
        ]

    def places(self) -> tuple[int, int]:
        """Count the prompts that living instances decided to compute themselves, and those that they left to others."""
        choices = [node.manager._policy for node in self._nodes()]
        return sum(c.here.prompts for c in choices), sum(c.there.prompts for c in choices)

    # --- instances ---

    def _start(self, slot: Slot) -> None:
        slot.lives += 1
        slot.frozen_until.clear()
        slot.leaving = False
        options = make_options(**(OPTIONS | self._options | {"disaggregation_mode": slot.mode}))
        epoch = f"{slot.mode[0]}{slot.bootstrap_port - 9000}.{slot.lives}"
        sealed = bool(self._options.get("return_kv"))
        rules = {"lets_go": self._lets_go, "hostile": self._hostile, "sealed": sealed, "window": self._window}
        whim = lambda req: zlib.crc32(f"{epoch} {req.rid}".encode()) / 1e8  # noqa: E731
        foresees = whim if self._machine is None else None
        slot.node = Node(
            self.world, epoch, slot.bootstrap_port, options, foresees=foresees, machine=self._machine, **rules
        )
        self._beat(slot, slot.node)
        self._renew(slot, slot.node)

    def _beat(self, slot: Slot, node: Node) -> None:
        if node.alive:
            if not self._is_frozen(slot, "scheduler"):
                node.turn()
            self.chance.after(TURN_SECONDS, lambda: self._beat(slot, node))

    def _renew(self, slot: Slot, node: Node) -> None:
        if node.alive and slot.node is node:
            node.network.renew()
            self.chance.after(LEASE_RENEWAL, lambda: self._renew(slot, node))

    def _nodes(self) -> list[Node]:
        return [slot.node for slot in self._slots if slot.node is not None]

    def _slot_of(self, epoch: str) -> Slot | None:
        return next((s for s in self._slots if s.node is not None and s.node.epoch == epoch), None)

    def _is_frozen(self, slot: Slot, what: str) -> bool:
        return self.world.now < slot.frozen_until.get(what, 0.0)

    def _is_held(self, channel: Channel) -> bool:
        kind, whose = channel[0], channel[-1]
        if kind not in ("client", "events", "find", "worker", "transfer"):
            return False
        slot = self._slot_of(str(whose))
        part = "worker" if kind in ("worker", "transfer") else "scheduler"
        return slot is not None and self._is_frozen(slot, part)

    # --- requests ---

    def _submit(self) -> None:
        rng = self.rng
        able = [s for s in self._slots if s.node is not None and not s.leaving]
        senders = [s for s in able if s.mode != "decode"]
        if not senders:
            return
        sender = rng.choice(senders)
        receivers = [s for s in able if s.mode != "prefill" and s is not sender]
        if not receivers:
            return
        receiver = rng.choice(receivers)
        rid = f"r{next(self._rids)}"
        prompt = self._prompt()
        max_new_tokens = rng.choice(self._outputs)
        self.world.answers[rid] = reference_output(prompt, max_new_tokens)
        room = rng.getrandbits(63)
        fate = ""
        if self._mishaps and self._rooms and rng.random() < 0.02:
            room, fate = rng.choice(self._rooms[-20:]), "a room used twice"
            # Legs meet by the room: those of the one before may find one of these.
            self.submitted |= {leg: fate for leg in self._legs[room] if not self.submitted[leg]}
        self._rooms.append(room)
        legs = [sender, receiver]
        if self._mishaps and rng.random() < 0.03:
            legs.remove(rng.choice(legs))
            fate = "one leg"
        for slot in legs:
            assert slot.node is not None
            self._leg(slot.node, rid, prompt, room, sender.bootstrap_port, max_new_tokens, fate)
        if self._mishaps and rng.random() < 0.08:
            slot = rng.choice(legs)
            assert slot.node is not None
            for other in legs:
                assert other.node is not None
                self.submitted[other.node.epoch, rid] = "aborted"
            self._abort(slot.node, rid)

    def _prompt(self) -> list[int]:
        rng = self.rng
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 4, 5, 9, 17, 30]))]
        if self._prompts and rng.random() < 0.4:
            before = rng.choice(self._prompts[-30:])
            prompt = before[: rng.randrange(len(before) + 1)] + prompt
        self._prompts.append(prompt)
        return prompt[:60]

    def _leg(
        self, node: Node, rid: str, prompt: list[int], room: int, port: int, max_new_tokens: int, fate: str
    ) -> None:
        self.submitted[node.epoch, rid] = fate
        self._legs.setdefault(room, []).append((node.epoch, rid))

        def submit() -> None:
            if node.alive:
                node.submit(rid, prompt, room, port, max_new_tokens=max_new_tokens)

        self.world.post(("client", rid, node.epoch), f"{node.epoch} gets {rid} (room {room})", submit)

    def _abort(self, node: Node, rid: str) -> None:
        def abort() -> None:
            if node.alive:
                node.abort(rid)

        def post() -> None:
            self.world.post(("client", rid, node.epoch), f"{node.epoch} loses the client of {rid}", abort)

        self.chance.after(self.rng.expovariate(1 / 0.02), post)

    def _move(self) -> None:
        """Move one of the requests, in any state, to any of the instances."""
        busy = [node for node in self._nodes() if node.scheduler.reqs]
        if not busy:
            return
        node, slot = self.rng.choice(busy), self.rng.choice(self._slots)
        rid = self.rng.choice(list(node.scheduler.reqs))

        def move() -> None:
            if node.alive:
                node.migrate(rid, slot.bootstrap_port)

        self.world.post(("client", rid, node.epoch), f"{node.epoch} is to move {rid} to :{slot.bootstrap_port}", move)

    def _resize(self) -> None:
        """Resize the pool of one of the instances, in any state."""
        nodes = self._nodes()
        if not nodes:
            return
        node, tokens, wait_s = self.rng.choice(nodes), self.rng.choice(SIZES), self.rng.choice((0.0, 0.5, 3.0))

        def resize() -> None:
            if node.alive:
                node.resize(tokens, wait_s)

        self.world.post(("client", "admin", node.epoch), f"{node.epoch} is to have a pool of {tokens}", resize)

    # --- faults ---

    def _fault(self) -> None:
        faults = [self._crash, self._break_control, self._break_data, self._freeze, self._repeat, self._corrupt]
        if self._hostile:
            faults += [self._lose] * 3
        fault = self.rng.choice(faults)
        slot = self.rng.choice(self._slots)
        if slot.node is not None and fault(slot, slot.node):
            self._is_calm = False
            self.faults[fault.__name__.strip("_")] += 1

    def _crash(self, slot: Slot, node: Node) -> bool:
        for connection, side in node.network.port.connections:
            self._cut(connection.channel(side))
        node.die(lambda n: self.rng.randint(0, n))
        slot.node = None

        def start() -> None:
            if slot.node is None:
                self._start(slot)

        self.chance.after(self.rng.choice([0.05, 1.0, 8.0]), start)
        return True

    def _break_control(self, slot: Slot, node: Node) -> bool:
        connections = node.network.port.connections
        if not connections:
            return False
        connection, _ = self.rng.choice(connections)
        for side in (0, 1):
            self._cut(connection.channel(side))
            connection.post(side, "the connection breaks", lambda end=1 - side: connection.end(end, "it broke"))
        return True

    def _break_data(self, slot: Slot, node: Node) -> bool:
        links = [link for link in node.backend.links() if link.owner is not None]
        if not links:
            return False
        link = self.rng.choice(links)
        self._cut(link.channel("out"))
        self.world.post(link.channel("out"), "a link breaks", lambda: link.owner.on_end(link, "it broke"))
        self.world.post(link.channel("back"), "a link breaks", lambda: link.writer.on_end(link, "it broke"))
        return True

    def _freeze(self, slot: Slot, node: Node) -> bool:
        what = self.rng.choice(["scheduler", "worker"])
        until = self.world.now + self.rng.choice([0.2, 1.0, 4.0, 12.0])
        slot.frozen_until[what] = until
        self._set_frozen(slot, node)
        self.chance.at(until + 0.001, lambda: self._set_frozen(slot, node))
        return True

    def _set_frozen(self, slot: Slot, node: Node) -> None:
        node.frozen = self._is_frozen(slot, "scheduler")
        node.worker_frozen = node.backend.frozen = self._is_frozen(slot, "worker")
        node.work()
        node.turn()

    def _repeat(self, slot: Slot, node: Node) -> bool:
        """Send the last control message again. Returns whether there was one."""
        waiting = [c for c, items in self.world.channels.items() if c[0] == "control" and items[-1].content]
        if not waiting:
            return False
        channel = self.rng.choice(waiting)
        last = self.world.channels[channel][-1]
        self.world.post(channel, f"{last.what} again", last.act, last.content)
        return True

    def _corrupt(self, slot: Slot, node: Node) -> bool:
        node.backend.corrupts = True

        def mend() -> None:
            node.backend.corrupts = False

        self.chance.after(0.1, mend)
        return True

    def _lose(self, slot: Slot, node: Node) -> bool:
        node.backend.loses = True
        return True

    def _cut(self, channel: Channel) -> None:
        """Drop some of what is under way in a channel."""
        waiting = len(self.world.channels.get(channel, ()))
        self.world.forget(channel, self.rng.randint(0, waiting))

    # --- the end ---

    def _settle(self) -> None:
        deadline = self.world.now + QUIET_SECONDS
        while self.world.now < deadline and not self._is_quiet():
            self.chance.run(self.world.now + 1.0)
        for node in self._nodes():
            node.check_quiet()
        self._count()

    def _is_quiet(self) -> bool:
        if any(slot.node is None for slot in self._slots):
            return False
        busy = any(not i.what.endswith("Heartbeat") for items in self.world.channels.values() for i in items)
        return (
            not busy
            and all(not n.open and not n.backend.granted for n in self._nodes())
            and not any(node.manager.transfers(self.world.now) for node in self._nodes())
        )

    def _count(self) -> None:
        """Count how every leg ended on a living instance.

        Raises ``Violation`` if one did not end, or failed without a reason.
        """
        alive = {node.epoch for node in self._nodes()}
        for answer in (answer for node in self._nodes() for answer in node.move_answers):
            self.moves[answer.text if isinstance(answer, RefusedAnswer) else "moved"] += 1
        # The prompt is computed again then, so that nothing else tells.
        if self._is_calm and any(node.mismatches for node in self._nodes()):
            raise Violation("KV that landed was not what was sent, although nothing went wrong")
        for epoch, rid in self.submitted:
            fate = self.fate_of(epoch, rid)
            end = self.world.ends.get((epoch, rid))
            if end is None:
                if epoch in alive:
                    raise Violation(f"{epoch}: {rid} never ended ({fate or 'nothing was done to it'})")
                self.outcomes["died with its instance"] += 1
            elif isinstance(end, ReqMoved):
                self.outcomes["moved"] += 1
            elif isinstance(end, Stopped):
                self.outcomes["stopped"] += 1
            elif isinstance(end, ReqError):
                self.outcomes[f"error {end.status}"] += 1
                if not self._is_excused(end, fate):
                    raise Violation(f"{epoch}: {rid} failed although nothing went wrong: {end.message}")
            elif end.finish.type is FinishType.ABORT:
                self.outcomes["aborted"] += 1
            elif end.finish.type is FinishType.TIMEOUT:
                self.outcomes["timed out"] += 1
            else:
                self.outcomes["finished"] += 1

    def fate_of(self, epoch: str, rid: str) -> str:
        """Return what happened to a leg that may fail it, "" for nothing.

        A pool that was resized may be too small for a prompt: one leg is refused, and the other waits for it in vain.
        """
        ends = [end for (_, name), end in self.world.ends.items() if name == rid] if self._resize_rate else []
        if any(isinstance(end, ReqError) and end.code == "context_length_exceeded" for end in ends):
            return TOO_LONG
        return self.submitted[epoch, rid]

    def _is_excused(self, error: ReqError, fate: str) -> bool:
        """Return whether a leg to which ``fate`` happened ("" for nothing) may fail with this error."""
        return not self._is_calm or bool(fate)
