"""Instances with queues and prefix caches in virtual time, behind a router's real fleet and policy."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

from pdserve.router.attempts import Attempt
from pdserve.router.facts import Facts
from pdserve.router.fleet import Fleet
from pdserve.router.instance import HealthReport, HealthState, Instance, ReportedPace
from pdserve.router.options import RouterOptions
from pdserve.router.request_body import RequestBody
from pdserve.router.targets import Pair, Target
from pdserve.router.work import Answering, Computing
from pdserve.runtime.web.apis import path_table
from pdserve.runtime.web.paths import Server

CHAT = path_table(Server.ROUTER).find("/v1/chat/completions")
TOKEN_BYTES = 4
PROMPT_MS = 0.2
"""Milliseconds that an instance takes to compute one prompt token."""
ANSWER_MS = 15.0
"""Milliseconds from one token of an answer to the next."""
STREAM_MS = 0.5
"""Milliseconds that instances report as the additional time for each further answer."""
BUSY_FACTOR = 3.0
"""Factor by which an instance that computes prompts reports a longer time per token."""
REPORT_SECONDS = 1.0


class Message(NamedTuple):
    """A message of a conversation. Equal ones have equal names."""

    name: int
    tokens: int

    @property
    def text(self) -> str:
        return text_of(self)


@lru_cache(maxsize=4096)
def text_of(message: Message) -> str:
    """Return the text of a message: random, and the same each time."""
    return random.Random(message.name).randbytes(message.tokens * TOKEN_BYTES // 2).hex()


class Job(NamedTuple):
    at: float
    """Arrival, in seconds."""
    messages: tuple[Message, ...]
    answer_tokens: int

    @property
    def tokens(self) -> int:
        return sum(message.tokens for message in self.messages)

    def facts(self) -> Facts:
        messages = [{"role": "user", "content": message.text} for message in self.messages]
        key = str(self.messages[1].name)
        body = json.dumps({"messages": messages, "prompt_cache_key": key}).encode()
        return Facts(RequestBody.parse(body, facts=CHAT))


def conversations(seed: int, count: int, rate: float, turns: int = 6) -> list[Job]:
    """Draw ``count`` conversations that begin at ``rate`` a second, and return their requests in order of arrival.

    Each begins with one of four system prompts. A request repeats all messages before it. Some messages are very long.
    """
    drawn = random.Random(seed)
    names = itertools.count(seed * 1_000_000)
    systems = [Message(next(names), 500) for _ in range(4)]
    jobs, began = [], 0.0
    for _ in range(count):
        began += drawn.expovariate(rate)
        at, messages = began, [drawn.choice(systems)]
        for _ in range(drawn.randint(1, turns)):
            length = min(8000, int(drawn.lognormvariate(5.3, 1.2)) + 8)
            messages.append(Message(next(names), length))
            answer = drawn.randint(10, 200)
            jobs.append(Job(at, tuple(messages), answer))
            messages.append(Message(next(names), answer))
            at += answer * ANSWER_MS / 1000 + drawn.uniform(2, 20)
    return sorted(jobs)


class PrefixCache:
    """LRU cache of ``capacity`` tokens, by runs of messages."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = 0
        self._runs: OrderedDict[tuple[Message, ...], int] = OrderedDict()

    def use(self, messages: tuple[Message, ...]) -> int:
        """Return the tokens of ``messages`` that are cached, and cache all of them."""
        cached = 0
        for length in range(len(messages), 0, -1):  # the end first, so that it is evicted first
            run = messages[:length]
            if run in self._runs:
                cached = max(cached, sum(message.tokens for message in run))
            else:
                self._tokens += run[-1].tokens
            self._runs[run] = run[-1].tokens
            self._runs.move_to_end(run)
        while self._tokens > self._capacity:
            self._tokens -= self._runs.popitem(last=False)[1]
        return cached


class Outcome(NamedTuple):
    seconds: float
    """Time to the first token."""
    tokens: int
    cached: int


@dataclass
class SimServer:
    """One instance: it computes prompts one after the other, and answers all at once."""

    cache: PrefixCache
    waiting: deque[tuple[Job, Callable[[int], None]]] = field(default_factory=deque)
    is_busy: bool = False


class RoutingSim:
    """A router in front of ``workers`` and ``pairs`` of instances, each with a cache of ``cache_tokens``.

    ``reports``: let each instance report its pace once a second, as it was at that time.
    """

    def __init__(
        self,
        policy: str,
        cache_tokens: int,
        *,
        workers: int = 8,
        pairs: int = 0,
        reports: bool = False,
        **options: float,
    ) -> None:
        urls = {"worker": [f"http://w{i}" for i in range(workers)]}
        if pairs:
            urls["prefill"] = [f"http://p{i}" for i in range(pairs)]
            urls["decode"] = [f"http://d{i}" for i in range(pairs)]
        self.fleet = Fleet(RouterOptions(policy=policy, **urls, **options))
        for instance in self.fleet.instances:
            self.fleet.set_state(instance, HealthState.HEALTHY, "test")
        self._servers = {instance: SimServer(PrefixCache(cache_tokens)) for instance in self.fleet.instances}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.now = 0.0
        self._reports = reports
        self.outcomes: list[Outcome] = []
        self.sent_to: list[Target] = []

    def run(self, jobs: list[Job]) -> list[Outcome]:
        """Serve ``jobs`` to their ends."""
        random.seed(1)  # for the policies that draw
        for job in jobs:
            self._at(job.at, partial(self._arrive, job))
        if self._reports:
            for second in range(int(jobs[-1].at / REPORT_SECONDS) + 1):
                self._at(second * REPORT_SECONDS, self._report)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.outcomes

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), event))

    def _report(self) -> None:
        for instance, server in self._servers.items():
            decode_ms = ANSWER_MS + STREAM_MS * instance.answers
            token_ms = decode_ms * (BUSY_FACTOR if server.is_busy else 1.0)
            instance.learn(HealthReport(pace=ReportedPace(token_ms, decode_ms, STREAM_MS, 0.0, 1 << 20)))

    def _arrive(self, job: Job) -> None:
        facts = job.facts()
        target = self.fleet.pick(facts)
        assert target is not None
        self.sent_to.append(target)
        prefill, decode = target if isinstance(target, Pair) else (target, target)
        attempt = Attempt(self.fleet.policy, target, facts).__enter__()
        answering = Answering(decode).__enter__()
        computing = Computing(prefill, facts.prompt_tokens, for_decode=prefill is not decode)

        def computed(cached: int) -> None:
            computing.done()
            self.outcomes.append(Outcome(self.now - job.at, job.tokens, cached))
            self._at(self.now + job.answer_tokens * ANSWER_MS / 1000, ended)

        def ended() -> None:
            answering.__exit__()
            attempt.__exit__(None, None, None)

        self._servers[prefill].waiting.append((job, computed))
        self._next(prefill)

    def _next(self, instance: Instance) -> None:
        server = self._servers[instance]
        if server.is_busy or not server.waiting:
            return
        job, computed = server.waiting.popleft()
        cached = server.cache.use(job.messages)
        server.is_busy = True

        def done() -> None:
            server.is_busy = False
            computed(cached)
            self._next(instance)

        self._at(self.now + (job.tokens - cached) * PROMPT_MS / 1000, done)


def hit_rate(outcomes: list[Outcome]) -> float:
    """Return the share of prompt tokens that were cached."""
    return sum(one.cached for one in outcomes) / sum(one.tokens for one in outcomes)


def percentile(outcomes: list[Outcome], share: float) -> float:
    """Return the time to first token, in seconds, that ``share`` of the requests stay within."""
    times = sorted(one.seconds for one in outcomes)
    return times[min(len(times) - 1, int(share * len(times)))]


def tokens_of(jobs: list[Job]) -> int:
    """Return the tokens of all different runs of messages: the size of a cache that would hold everything."""
    runs: Iterator[tuple[Message, ...]] = (job.messages[:n] for job in jobs for n in range(1, len(job.messages) + 1))
    return sum(run[-1].tokens for run in set(runs))
