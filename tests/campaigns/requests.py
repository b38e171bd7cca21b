"""Draws requests: what both legs of a hand-over have in common is drawn once."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from support.sim import make_generate

from pdserve.messages.requests import Bootstrap, GenerateReq, LogprobOptions, forked

from .features import Features

PRIORITIES = (0, 0, 0, 5, 50)
KEYS = ("A", "B", "C")
USERS = ("", "x", "y")
FORKS = (1, 2, 3)
TIMEOUTS = (0.005, 0.05, 0.5)
"""Seconds: before a request is linked with its peer, in the middle of its prompt, in the middle of its output."""
SCORED_FROM = (-1, 0, 2)
"""First prompt position with a wanted log-probability; -1: of the output alone."""


class RequestMaker:
    """Makes the messages of requests. ``rng`` is used for nothing but their traits."""

    def __init__(self, features: Features, rng: random.Random) -> None:
        self._features = features
        self._rng = rng
        self._traits: dict[str, tuple[dict[str, Any], int]] = {}
        """Fields of a request, and its forks, by rid."""

    def traits(self, rid: str) -> dict[str, Any]:
        """Return the fields of a request beyond its prompt, drawn when it is first asked for."""
        return self._drawn(rid)[0]

    def messages(self, rid: str, prompt: list[int], max_new_tokens: int, where: Bootstrap) -> list[GenerateReq]:
        """Return a leg of a hand-over, and further answers to its prompt."""
        fields, forks = self._drawn(rid)
        first = msgspec.structs.replace(
            make_generate(rid, prompt, max_new_tokens=max_new_tokens), bootstrap=where, **fields
        )
        further = [forked(first, i, f"{rid}-fork{i}") for i in range(1, forks + 1)]
        return [first, *(msgspec.structs.replace(msg, fork_of=rid) for msg in further)]

    def local(self, rid: str, prompt: list[int], max_new_tokens: int) -> GenerateReq:
        """Return a request without a hand-over."""
        fields, _ = self._drawn(rid)
        return msgspec.structs.replace(make_generate(rid, prompt, max_new_tokens=max_new_tokens), **fields)

    def _drawn(self, rid: str) -> tuple[dict[str, Any], int]:
        if rid not in self._traits:
            self._traits[rid] = self._draw()
        return self._traits[rid]

    def _draw(self) -> tuple[dict[str, Any], int]:
        rng, features = self._rng, self._features
        fields: dict[str, Any] = {}
        if features.priorities:
            fields |= {
                "priority": rng.choice(PRIORITIES),
                "key_name": rng.choice(KEYS),
                "user": rng.choice(USERS),
            }
        if rng.random() < features.deadlines:
            fields["timeout_s"] = rng.choice(TIMEOUTS)
        if rng.random() < features.logprobs:
            fields["logprobs"] = LogprobOptions(rng.choice(SCORED_FROM))
        return fields, rng.choice(FORKS) if rng.random() < features.forks else 0
