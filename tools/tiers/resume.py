"""Time to continue a conversation from a store, beside computing it again.

Each conversation has its first turn on one instance, which is killed (-9) when all of it is stored. Its second turn is
sent to:

- the same instance after a restart;
- another instance with the same store;
- that instance again, with a folder's files no longer in the system's memory;
- an instance without tiers.

One token is asked for, so the time of an answer is that of its first token.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from random import Random
from typing import NamedTuple

from .instance import Instance, instance
from .options import MOST_TURN_TOKENS, TierBenchOptions

ANSWER, QUESTION = 16, 32
TOKEN_IDS = (10, 40_000)
WARM_UP_TOKENS = 600
PLACES = ("restarted", "elsewhere", "elsewhere, from disk", "computed")


class Conversation(NamedTuple):
    """Its first turn, and what was answered."""

    prompt: list[int]
    answer: list[int]

    def second_turn(self, rng: Random) -> list[int]:
        """Return the second turn's prompt: the first turn, its answer, and a new random question.

        The question differs at each call, so the store never has its KV.
        """
        return self.prompt + self.answer + random_tokens(rng, QUESTION)


class Resumed(NamedTuple):
    """Medians of one length: seconds, and the share of the prompt that was not computed."""

    tokens: int
    seconds: dict[str, float]
    cached: dict[str, float]


class ResumeResult(NamedTuple):
    """``kv_bytes``: of a token. ``fetch_rate``: bytes a second that the store gave, from memory and from the disk;
    ``copy_rate``: between host memory and the pool; ``store_rate``: that it took.
    """

    rows: list[Resumed]
    kv_bytes: float
    fetch_rate: dict[str, float]
    store_rate: float


def random_tokens(rng: Random, count: int) -> list[int]:
    """Return ``count`` random token ids."""
    return [rng.randrange(*TOKEN_IDS) for _ in range(count)]


def measure_resume(options: TierBenchOptions, folder: Path) -> ResumeResult:
    """Measure how long conversations take to go on from a store after a restart, and if they are computed again.

    ``folder``: empty folder for stores and logs of the servers.
    """
    rng = Random(1)
    store = options.url or str(folder / "kv")
    size = str(2 * (max(options.tokens) + MOST_TURN_TOKENS))
    plain = ["--model-path", options.model_path, "--max-total-tokens", size]
    tiers = ["--enable-hierarchical-cache", "--hicache-storage-backend", options.store, "--hicache-storage-url", store]
    tiers += ["--hicache-storage-prefetch-policy", "wait_complete"]
    with instance(folder, *plain, *tiers) as first:
        asked = [random_tokens(rng, length) for length in options.tokens for _ in range(options.repeat)]
        talks = [Conversation(prompt, first.ask(prompt, ANSWER).tokens) for prompt in asked]
        first.wait_stored()
        counters = first.info()["tiers"]
        page_bytes = _page_bytes(first)
        store_rate = counters["stored"] * page_bytes / counters["store_seconds"]
        kv_bytes = page_bytes / first.info()["kv_layout"]["page_size"]
        first.kill()
    seconds: dict[str, list[float]] = {}
    cached: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    for place in PLACES:
        if place.endswith("from disk"):
            if options.store != "file":
                continue
            _out_of_memory(Path(store))
        with instance(folder, *plain, *(tiers if place != "computed" else ())) as server:
            server.ask(random_tokens(rng, WARM_UP_TOKENS), 2)
            turns = [talk.second_turn(rng) for talk in talks]
            answers = [server.ask(turn, 1) for turn in turns]
            seconds[place] = [answer.seconds for answer in answers]
            cached[place] = [answer.cached / len(turn) for answer, turn in zip(answers, turns, strict=True)]
            if place != "computed":
                counters = server.info()["tiers"]
                rates[place] = counters["fetched"] * page_bytes / counters["fetch_seconds"]
    rows = [
        Resumed(length, _medians(seconds, i, options.repeat), _medians(cached, i, options.repeat))
        for i, length in enumerate(options.tokens)
    ]
    return ResumeResult(rows, kv_bytes, rates, store_rate)


def _medians(values: dict[str, list[float]], i: int, repeat: int) -> dict[str, float]:
    return {place: statistics.median(all_[i * repeat : (i + 1) * repeat]) for place, all_ in values.items()}


def _page_bytes(server: Instance) -> float:
    info = server.info()
    return float(info["tiers"]["page_bytes"])


def _out_of_memory(store: Path) -> None:
    """Drop the store's files from the page cache, so that the next reads go to the disk."""
    os.sync()
    for page in store.rglob("*.page"):
        fd = os.open(page, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
