"""A campaign of ``support.world`` with a load that combines features that are tested one by one elsewhere."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from support.sim import VOCAB, reference_output
from support.world.campaign import Campaign, Slot
from support.world.node import HOST, Node

from pdserve.messages.outputs import ReqError
from pdserve.messages.requests import Bootstrap, GenerateReq
from pdserve.messages.worker import ForwardStep

from .features import Features, Prompts
from .judges import JUDGES
from .requests import RequestMaker

DRAIN_SECONDS = 20.0
"""An instance that drains is ended then, whatever is left."""
LOOK_SECONDS = 0.3
"""Seconds between two looks at whether an instance is drained."""
STOP_SECONDS = 0.3
"""A stop string is found within this time."""


class MixedCampaign(Campaign):
    """See the module. The features draw from a generator of their own.

    So the hand-overs of a seed are the same with and without them, up to the first difference in what the instances do.
    """

    def __init__(
        self, seed: int, modes: tuple[str, ...], features: Features, prompts: Prompts | None, **rules: Any
    ) -> None:
        self.features = features
        self.prompts = prompts
        self.extra = random.Random(seed * 7 + 1)
        self.events: Counter[str] = Counter()
        """What happened to instances, beside faults."""
        self._requests = RequestMaker(features, self.extra)
        self._judges = [judge(self) for judge in JUDGES]
        super().__init__(seed, modes, **rules)

    # --- what judges see ---

    @property
    def is_calm(self) -> bool:
        """See ``judges.Case``."""
        return self._is_calm

    @property
    def nodes(self) -> list[Node]:
        """See ``judges.Case``."""
        return self._nodes()

    def untouched(self) -> list[str]:
        """See ``judges.Case``."""
        return [rid for n in self.nodes for rid in n.open if self.submitted.get((n.epoch, rid)) == ""]

    def fate(self, node: Node, rid: str) -> str:
        """See ``judges.Case``."""
        return self.fate_of(node.epoch, rid)

    def longest_wait(self) -> float:
        """Return the longest time from a request's arrival to its first token or its end, in seconds.

        Requests to which something was done are left out, and so are instances that have died.
        """
        waits = ((node.epoch, rid, seconds) for node in self.nodes for rid, seconds in node.waits.items())
        return max((seconds for epoch, rid, seconds in waits if self.submitted.get((epoch, rid)) == ""), default=0.0)

    def run(self, handovers: int, rate: float = 60.0) -> None:
        """See ``Campaign``."""
        super().run(handovers, rate)
        for judge in self._judges:
            judge.at_end()

    def _start(self, slot: Slot) -> None:
        super()._start(slot)
        assert slot.node is not None
        slot.node.turned = self._after_turn
        if self.features.bad_logits:
            slot.node.spoils = self._spoil

    def _after_turn(self, node: Node) -> None:
        for judge in self._judges:
            judge.after_turn(node)

    # --- requests ---

    def _prompt(self) -> list[int]:
        kind, rng = self.prompts, self.rng
        if kind is None:
            return super()._prompt()
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice(kind.own))]
        if self._prompts and rng.random() < kind.sharing:
            prompt = rng.choice(self._prompts[-20:])[: rng.choice(kind.shared)] + prompt
        self._prompts.append(prompt)
        return prompt[: kind.longest]

    def _leg(
        self, node: Node, rid: str, prompt: list[int], room: int, port: int, max_new_tokens: int, fate: str
    ) -> None:
        # The router says which leg an instance is meant to be: its role may change before the request arrives.
        leg = "prefill" if node.network.bootstrap_port == port else "decode"
        where = Bootstrap(HOST, port, room, trusted=node.sealed, leg=leg)
        messages = self._requests.messages(rid, prompt, max_new_tokens, where)
        for msg in messages:
            self.world.answers[msg.rid] = self.world.answers[rid]
            self.submitted[node.epoch, msg.rid] = fate or self._deadline(msg)
            self._legs.setdefault(room, []).append((node.epoch, msg.rid))
        self._post(node, messages, f"room {room}")
        if leg == "decode":
            self._may_stop(node, rid)
        if self.extra.random() < self.features.local:
            self._local(node, f"local-{rid}-{node.epoch}")

    def _local(self, node: Node, rid: str) -> None:
        """Send an instance a request that is computed there alone."""
        prompt, max_new_tokens = self._prompt(), self.rng.choice(self._outputs)
        self.world.answers[rid] = reference_output(prompt, max_new_tokens)
        msg = self._requests.local(rid, prompt, max_new_tokens)
        self.submitted[node.epoch, rid] = self._deadline(msg)
        self._post(node, [msg], "local")
        self._may_stop(node, rid)

    def _post(self, node: Node, messages: list[GenerateReq], what: str) -> None:
        rid, room = messages[0].rid, messages[0].bootstrap.room if messages[0].bootstrap is not None else None

        def arrive() -> None:
            if not node.alive:
                return
            if node.scheduler.draining:
                self._touch(rid, room, "refused by an instance that drains")
            for msg in messages:
                for judge in self._judges:
                    judge.arrives(node, msg)
            node.admit(*(msgspec.structs.replace(msg, arrival=self.world.now) for msg in messages))

        self.world.post(("client", rid, node.epoch), f"{node.epoch} gets {rid} ({what})", arrive)

    def _may_stop(self, node: Node, rid: str) -> None:
        if self.extra.random() >= self.features.stops:
            return

        def post() -> None:
            self.world.post(("client", rid, node.epoch), f"{node.epoch} finds a stop string in {rid}", stop)

        def stop() -> None:
            if node.alive:
                node.stop(rid)

        self.chance.after(self.extra.random() * STOP_SECONDS, post)

    # --- what excuses an error ---

    def _deadline(self, msg: GenerateReq) -> str:
        return "has a deadline" if msg.timeout_s else ""

    def _touch(self, rid: str, room: int | None, fate: str) -> None:
        """Note that something was done to a request that may fail all of its legs."""
        legs = [leg for leg in self.submitted if leg[1] == rid] if room is None else self._legs[room]
        self.submitted |= {leg: fate for leg in legs if not self.submitted[leg]}

    def _is_excused(self, error: ReqError, fate: str) -> bool:
        # Both legs are told the reason.
        is_spoilt = bool(self.features.bad_logits) and "not finite" in error.message
        return is_spoilt or super()._is_excused(error, fate)

    # --- what happens to instances ---

    def _submit(self) -> None:
        super()._submit()
        features, extra = self.features, self.extra
        if extra.random() < features.role_swaps:
            self._swap_roles()
        for rate, event in (
            (features.role_changes, self._change_role),
            (features.flushes, self._flush),
            (features.drains, self._drain),
        ):
            able = [slot for slot in self._slots if slot.node is not None and not slot.leaving]
            if able and extra.random() < rate:
                event(extra.choice(able))

    def _swap_roles(self) -> None:
        """Make each prefill a decode and each decode a prefill, in the middle of whatever they do."""
        for slot in self._slots:
            if slot.node is not None and slot.mode != "unified":
                slot.mode = "decode" if slot.mode == "prefill" else "prefill"
                self._order_role(slot.node, slot.mode)

    def _change_role(self, slot: Slot) -> None:
        assert slot.node is not None
        self._order_role(slot.node, self.extra.choice(("unified", "prefill", "decode")))

    def _order_role(self, node: Node, role: Any) -> None:
        def change() -> None:
            # An instance that drains has withdrawn, and must not register again.
            if node.alive and not node.scheduler.draining:
                node.change_role(role)

        self.events["roles"] += 1
        self.world.post(("client", "admin", node.epoch), f"{node.epoch} becomes {role}", change)

    def _flush(self, slot: Slot) -> None:
        assert slot.node is not None
        self.events["flushes"] += 1
        slot.node.scheduler.memory.flush()

    def _spoil(self, step: ForwardStep) -> list[int]:
        entries = len(step.rows) // 4
        if not entries or self.extra.random() >= self.features.bad_logits:
            return []
        self.events["bad logits"] += 1
        return [self.extra.randrange(entries)]

    def _drain(self, slot: Slot) -> None:
        node = slot.node
        assert node is not None
        self.events["drains"] += 1
        slot.leaving = True
        self._touch_rooms(node, is_unlinked, "its peer drains")
        node.drain([(HOST, other.bootstrap_port) for other in self._slots if other is not slot])
        self._look_drained(slot, node, self.world.now + DRAIN_SECONDS)

    def _look_drained(self, slot: Slot, node: Node, until: float) -> None:
        """End an instance that is drained, or late."""
        if slot.node is not node:
            return  # it has crashed meanwhile
        if node.scheduler.reqs and self.world.now < until:
            self.chance.after(LOOK_SECONDS, functools.partial(self._look_drained, slot, node, until))
            return
        self._touch_rooms(node, lambda node, rid: rid in node.open, "its peer has drained")
        self._crash(slot, node)

    def _touch_rooms(self, node: Node, concerns: Callable[[Node, str], bool], fate: str) -> None:
        """Note that something was done to an instance.

        It may fail the hand-overs that have a leg there, and those for which ``concerns`` is true.
        """
        lives = {n.epoch: n for n in self.nodes}
        for room, legs in self._legs.items():
            if all(epoch != node.epoch for epoch, _ in legs):
                continue
            if any(concerns(lives[epoch], rid) for epoch, rid in legs if epoch in lives):
                self._touch("", room, fate)


def is_unlinked(node: Node, rid: str) -> bool:
    """Return whether a leg has not found its peer yet: it can't once that has withdrawn its registration."""
    if (node.epoch, rid) in node.world.ends:
        return False
    req = node.scheduler.reqs.get(rid)
    return req is None or (req.hold is None and not req.times.ready)
