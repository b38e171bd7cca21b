"""A campaign of ``support.world`` whose load combines features that are tested one by one elsewhere."""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec
from support.sim import VOCAB, make_generate, reference_output
from support.world.campaign import Campaign, Slot
from support.world.node import HOST, Node
from support.world.world import Violation

from pdserve.messages.requests import Bootstrap, GenerateReq

from .features import Features, Prompts
from .judges import make_judges

PRIORITIES = (0, 0, 0, 5, 50)
KEYS = ("A", "B", "C")
USERS = ("", "x", "y")


class MixedCampaign(Campaign):
    """See the module. What the features draw comes from a generator of its own: the hand-overs of a seed are the same
    with and without them, up to the first difference in what the instances do.
    """

    def __init__(
        self, seed: int, modes: tuple[str, ...], features: Features, prompts: Prompts | None, **rules: Any
    ) -> None:
        self.features = features
        self.prompts = prompts
        self.extra = random.Random(seed * 7 + 1)
        self._traits: dict[str, dict[str, Any]] = {}
        """Fields of a request that both of its legs have."""
        super().__init__(seed, modes, **rules)
        self.judges = make_judges(self)
        for node in self.nodes:
            node.turned = self._after_turn

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

    def longest_wait(self) -> float:
        """Return the longest time from a request's arrival to its first token or its end, in seconds.

        Requests to which something was done are left out, and so are instances that have died.
        """
        return max(
            (
                seconds
                for node in self.nodes
                for rid, seconds in node.waits.items()
                if self.submitted.get((node.epoch, rid)) == ""
            ),
            default=0.0,
        )

    def run(self, handovers: int, rate: float = 60.0) -> None:
        """See ``Campaign``."""
        super().run(handovers, rate)
        for judge in self.judges:
            judge.at_end()

    def _after_turn(self, node: Node) -> None:
        for judge in self.judges:
            judge.after_turn(node)

    def _start(self, slot: Slot) -> None:
        super()._start(slot)
        if hasattr(self, "judges"):  # the first instances start before there are any
            assert slot.node is not None
            slot.node.turned = self._after_turn

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

    def _traits_of(self, rid: str) -> dict[str, Any]:
        """Return the fields of a request, drawn at its first leg."""
        if rid not in self._traits:
            drawn: dict[str, Any] = {}
            if self.features.priorities:
                drawn |= {
                    "priority": self.extra.choice(PRIORITIES),
                    "key_name": self.extra.choice(KEYS),
                    "user": self.extra.choice(USERS),
                }
            self._traits[rid] = drawn
        return self._traits[rid]

    def _leg(
        self, node: Node, rid: str, prompt: list[int], room: int, port: int, max_new_tokens: int, fate: str
    ) -> None:
        self.submitted[node.epoch, rid] = fate
        self._legs.setdefault(room, []).append((node.epoch, rid))
        # The router says which leg an instance is meant to be: its role may change before the request arrives.
        leg = "prefill" if node.network.bootstrap_port == port else "decode"
        where = Bootstrap(HOST, port, room, vouched=node.sealed, leg=leg)
        self._post(node, self._request(rid, prompt, max_new_tokens, where), f"room {room}")
        if self.extra.random() < self.features.local:
            self._local(node, f"local-{rid}-{node.epoch}", self._traits_of(rid))

    def _local(self, node: Node, rid: str, traits: dict[str, Any]) -> None:
        """Send an instance a request that is computed there alone."""
        prompt, max_new_tokens = self._prompt(), self.rng.choice(self._outputs)
        self.world.answers[rid] = reference_output(prompt, max_new_tokens)
        self._traits[rid] = traits
        self.submitted[node.epoch, rid] = ""
        self._post(node, self._request(rid, prompt, max_new_tokens, None), "local")

    def _request(self, rid: str, prompt: list[int], max_new_tokens: int, bootstrap: Bootstrap | None) -> GenerateReq:
        msg = make_generate(rid, prompt, max_new_tokens=max_new_tokens)
        return msgspec.structs.replace(msg, bootstrap=bootstrap, **self._traits_of(rid))

    def _post(self, node: Node, msg: GenerateReq, what: str) -> None:
        def arrive() -> None:
            if node.alive:
                node.admit(msgspec.structs.replace(msg, arrival=self.world.now))

        self.world.post(("client", msg.rid, node.epoch), f"{node.epoch} gets {msg.rid} ({what})", arrive)

    # --- what happens to instances ---

    def _submit(self) -> None:
        super()._submit()
        if self.extra.random() < self.features.role_swaps:
            self._swap_roles()

    def _swap_roles(self) -> None:
        """Each prefill becomes a decode and each decode a prefill, in the middle of whatever they do."""
        for slot in self._slots:
            if slot.node is None or slot.mode == "unified":
                continue
            slot.mode = "decode" if slot.mode == "prefill" else "prefill"
            change = functools.partial(slot.node.change_role, slot.mode)
            self.world.post(("client", "role", slot.node.epoch), f"{slot.node.epoch} becomes a {slot.mode}", change)


__all__ = ["MixedCampaign", "Violation"]
