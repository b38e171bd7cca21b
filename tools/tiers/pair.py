"""The worth of a store for a pair: the second turn of a conversation after a restart of both instances.

There are three cases:

- no instance has the store;
- the prefill has it, fetches and hands over;
- both have it, so the decode may fetch pages itself.

Each is measured with an idle prefill, and with one that computes another prompt of equal length.

The pair is asked as by a router. The results are the times of the first token, and of the second one, which waits for
the KV.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

from pdserve.runtime.web.ports import free_ports

from .instance import Instance, instance
from .options import MOST_TURN_TOKENS, TierBenchOptions
from .resume import ANSWER, WARM_UP_TOKENS, Conversation, random_tokens

MOST_ROOM = 1 << 63


class PairRow(NamedTuple):
    """Result of one case: medians in seconds, and tokens and bytes of all conversations of a length together."""

    name: str
    busy: bool
    tokens: int
    first_token: float
    second_token: float
    computed: int
    fetched_by_decode: int
    handed_over_bytes: int


class _Pair:
    def __init__(self, prefill: Instance, decode: Instance, bootstrap: int, rng: Random) -> None:
        self.prefill, self.decode = prefill, decode
        self._bootstrap, self._rng = bootstrap, rng

    def ask(self, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
        """Send both legs of a request, and wait for the end.

        Return the tokens, and the seconds until each of them came.
        """
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._bootstrap,
            "bootstrap_room": self._rng.randrange(MOST_ROOM),
        }
        with ThreadPoolExecutor(1) as legs:
            leg = legs.submit(self.prefill.post, body)
            answer = self.decode.stream(body)
            leg.result()
        return answer

    @contextmanager
    def busy_with(self, length: int) -> Iterator[None]:
        """Have the prefill compute another prompt of ``length`` tokens.

        The ``with`` block begins when it has the prompt. The end of the block waits until that prompt is computed.
        """
        sampling = {"max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": random_tokens(self._rng, length), "sampling_params": sampling}
        with ThreadPoolExecutor(1) as other:
            done = other.submit(self.prefill.post, body)
            self.prefill.wait_busy()
            yield
            done.result()

    def counts(self) -> tuple[int, int, int]:
        """Return totals since the start: tokens computed, tokens that the decode fetched, and bytes handed over."""
        infos = [self.prefill.info(), self.decode.info()]
        computed = sum(info["counters"]["prompt_tokens"] for info in infos)
        handovers = infos[1]["disaggregation"]
        return computed, handovers["store_first"]["tokens"], handovers["received"]["bytes"]


@contextmanager
def _pair(folder: Path, rng: Random, prefill: list[str], decode: list[str]) -> Iterator[_Pair]:
    [bootstrap] = free_ports(1)
    leg = ["--disaggregation-transfer-backend", "tcp", "--disaggregation-bootstrap-port", str(bootstrap)]
    leg += ["--allow-bootstrap", f"127.0.0.1:{bootstrap}", "--threads", "1"]
    with (
        instance(folder, "--disaggregation-mode", "prefill", *leg, *prefill) as first,
        instance(folder, "--disaggregation-mode", "decode", *leg, *decode) as second,
    ):
        yield _Pair(first, second, bootstrap, rng)


def measure_pair(options: TierBenchOptions, folder: Path) -> list[PairRow]:
    """Measure the second turns of conversations after both instances of a pair restarted. Return a row for each case.

    The cases differ in which instances have the store, in the length, and in whether the prefill is busy. ``folder``:
    empty folder for stores and logs of the servers.
    """
    rng = Random(3)
    size = str(2 * (max(options.tokens) + MOST_TURN_TOKENS))
    plain = ["--model-path", options.model_path, "--max-total-tokens", size]
    store = options.url or str(folder / "kv")
    tiers = [*plain, "--enable-hierarchical-cache", "--hicache-storage-backend", options.store]
    tiers += ["--hicache-storage-url", store, "--hicache-storage-prefetch-policy", "wait_complete"]
    with _pair(folder, rng, tiers, tiers) as pair:
        asked = [random_tokens(rng, length) for length in options.tokens for _ in range(options.repeat)]
        talks = [Conversation(prompt, pair.ask(prompt, ANSWER)[0]) for prompt in asked]
        for server in (pair.prefill, pair.decode):
            server.wait_stored()
            server.kill()
    rows = []
    cases = {"nobody's": (plain, plain), "the prefill's": (tiers, plain), "both's": (tiers, tiers)}
    for name, (prefill, decode) in cases.items():
        with _pair(folder, rng, prefill, decode) as pair:
            pair.ask(random_tokens(rng, WARM_UP_TOKENS), 2)
            for busy in (False, True):
                turns = [talk.second_turn(rng) for talk in talks]
                for i, length in enumerate(options.tokens):
                    rows.append(_row(name, length, pair, turns[i * options.repeat : (i + 1) * options.repeat], busy))
                for server in (pair.prefill, pair.decode):
                    server.flush()
    return rows


def _row(name: str, length: int, pair: _Pair, turns: list[list[int]], busy: bool) -> PairRow:
    before, others = pair.counts(), 0
    answers = []
    for turn in turns:
        if busy:
            others += length
            with pair.busy_with(length):
                answers.append(pair.ask(turn, 2))
        else:
            answers.append(pair.ask(turn, 2))
    after = pair.counts()
    first, second = (statistics.median(times[i] for _, times in answers) for i in (0, 1))
    computed, fetched, nbytes = (now - then for now, then in zip(after, before, strict=True))
    return PairRow(name, busy, length, first, second, computed - others, fetched, nbytes)
