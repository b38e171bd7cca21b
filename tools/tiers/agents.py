"""Users that take turns on a pool too small for all: tokens computed again, with and without tiers.

Each turn sends the whole conversation and some more tokens, as agents do that call a tool. All users have their first
turn, then their second, and so on. So a cache that is too small has evicted each conversation when it comes again.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from random import Random
from typing import NamedTuple

from .instance import Instance, instance
from .options import TierBenchOptions
from .resume import random_tokens

HOST_SMALL = 1.0
"""Times the pool: what the second tier holds where the third is to be seen. Half of it may be on its way at a time."""


class AgentResult(NamedTuple):
    """``again``: prompt tokens that had been computed before. ``found``: cached tokens by tier. ``copy_seconds``: time
    that copies between pool and host held up steps. ``tokens``: all answers.
    """

    name: str
    prompt_tokens: int
    computed: int
    again: int
    found: dict[str, int]
    first_token_ms: float
    copy_seconds: float
    tokens: list[list[int]]


def measure_agents(options: TierBenchOptions, folder: Path) -> list[AgentResult]:
    """Measure conversations with the KV pool alone, with host memory too, and with a store as well.

    Return a result each. ``folder``: empty folder for stores and logs of the servers.
    """
    pool = options.pool_users * (options.conversation_tokens + 32)
    plain = ["--model-path", options.model_path, "--max-total-tokens", str(pool)]
    host = [*plain, "--enable-hierarchical-cache"]
    ratio = str(round(1.25 * options.users / options.pool_users, 2))
    store = ["--hicache-storage-backend", "file", "--hicache-storage-url", str(folder / "kv")]
    cases = {
        "pool alone": plain,
        "host memory for all": [*host, "--hicache-ratio", ratio],
        "little host memory, file store": [*host, "--hicache-ratio", str(HOST_SMALL), *store],
    }
    results = []
    for name, flags in cases.items():
        with instance(folder, *flags) as server:
            results.append(_run(name, server, options))
    return results


def _run(name: str, server: Instance, options: TierBenchOptions) -> AgentResult:
    rng = Random(2)
    prompts = [random_tokens(rng, options.first_tokens) for _ in range(options.users)]
    tokens: list[list[int]] = []
    asked = computed = again = 0
    found = {"device": 0, "host": 0, "storage": 0}
    seconds: list[float] = []
    known = [0] * options.users
    for _ in range(options.turns):
        for user in range(options.users):
            # One token first, for the time to it; the rest then finds the prompt in the pool.
            answer = server.ask(prompts[user], 1)
            rest = server.ask(prompts[user], options.answer_tokens)
            seconds.append(answer.seconds)
            asked += len(prompts[user])
            computed += len(prompts[user]) - answer.cached
            again += max(0, known[user] - answer.cached)
            for tier, count in (answer.details or {"device": answer.cached}).items():
                found[tier] += count
            tokens.append(rest.tokens)
            # The last token's KV is computed with the next turn.
            known[user] = len(prompts[user]) + options.answer_tokens - 1
            prompts[user] = prompts[user] + rest.tokens + random_tokens(rng, options.turn_tokens)
    tiers = server.info()["tiers"]
    copies = tiers["copy_seconds"] if tiers else 0.0
    return AgentResult(name, asked, computed, again, found, statistics.mean(seconds) * 1000, copies, tokens)
