"""The options of ``python -P -m tools.tiers``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pdserve.benchmark.errors import BenchOptionsError
from pdserve.mem_cache.storage.registry import StoreName

MOST_TURN_TOKENS = 128
"""Maximum tokens that a turn adds to a conversation: its answer, and the next question."""


@dataclass(frozen=True, kw_only=True)
class TierBenchOptions:
    """What to measure.

    Parameters
    ----------
    measure
        resume: conversations that go on after kill -9 and a restart, and at another instance, from a store, beside
        computing them again. agents: users that take turns on a pool too small for all, with and without tiers. pair:
        conversations that go on at a prefill and a decode, both restarted, by which of them have the store.
    model_path
        A folder, .gguf file, hub name or "smollm2".
    store
        Where the KV of --measure resume and pair is kept; file: in a folder of its own, which is removed.
    url
        URL of --store redis.
    tokens
        Lengths of the conversations that go on.
    repeat
        Conversations of each length; the median is printed.
    users
        Users of --measure agents.
    turns
        Turns of each user.
    pool_users
        How many users' whole conversations the pool holds.
    first_tokens
        Length of a user's first turn.
    turn_tokens
        What each later turn adds to the last one and its answer.
    answer_tokens
        Length of each answer.
    """

    measure: Literal["resume", "agents", "pair"] = "resume"
    model_path: str = "smollm2"
    store: StoreName = "file"
    url: str = ""
    tokens: list[int] = field(default_factory=lambda: [1024, 4096, 7168])
    repeat: int = 3
    users: int = 8
    turns: int = 10
    pool_users: int = 3
    first_tokens: int = 512
    turn_tokens: int = 128
    answer_tokens: int = 32

    def check(self) -> None:
        """Raise ``BenchOptionsError`` for a number below 1, or for a Redis store without a URL."""
        numbers = [self.repeat, self.users, self.turns, self.pool_users, self.first_tokens, self.turn_tokens]
        if min(*numbers, *self.tokens, self.answer_tokens) < 1:
            raise BenchOptionsError("all numbers must be 1 or more")
        if self.store == "redis" and not self.url:
            raise BenchOptionsError("--store redis needs --url, like redis://127.0.0.1:6379/0")

    @property
    def conversation_tokens(self) -> int:
        """Length of a user's conversation at the end, in tokens."""
        return self.first_tokens + (self.turns - 1) * self.turn_tokens + self.turns * self.answer_tokens
