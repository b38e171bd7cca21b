"""Instances with queues and prefix caches in virtual time, behind a router's real fleet and policy."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
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
"""Milliseconds from one token of an answer to the next, if there is no other answer."""
STREAM_MS = 0.5
"""Additional milliseconds for each answer that runs at the same time."""
BUSY_FACTOR = 3.0
"""Factor by which the time per token is longer while an instance computes prompts."""
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


def plain_load(seed: int, count: int, rate: float) -> list[Job]:
    """Draw ``count`` requests of very unequal lengths, ``rate`` a second. No two have a prefix in common."""
    drawn = random.Random(seed)
    names = itertools.count(seed * 1_000_000)
    jobs, at = [], 0.0
    for _ in range(count):
        at += drawn.expovariate(rate)
        length = min(8000, int(drawn.lognormvariate(5.8, 1.2)) + 8)
        messages = (Message(next(names), 100), Message(next(names), length))
        jobs.append(Job(at, messages, min(1500, int(drawn.lognormvariate(4.5, 1.0)) + 5)))
    return jobs


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
    token_ms: float
    """Mean time per token of the answer, in milliseconds."""


@dataclass
class SimServer:
    """One instance: it computes prompts one after the other, and answers all at once.

    All answers advance by the same number of tokens, ``progress``. An answer ends when it reaches a certain progress.
    """

    cache: PrefixCache
    waiting: deque[tuple[Job, Callable[[int], None]]] = field(default_factory=deque)
    is_busy: bool = False
    answers: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """Heap of running answers: the progress at which each ends, a number, and what to call then."""
    progress: float = 0.0
    advanced_at: float = 0.0
    version: int = 0
    """Number of changes of speed so far. An end that was planned before the last one is not valid."""

    @property
    def token_ms(self) -> float:
        return self.decode_ms * (BUSY_FACTOR if self.is_busy else 1.0)

    @property
    def decode_ms(self) -> float:
        return ANSWER_MS + STREAM_MS * len(self.answers)

    def advance(self, now: float) -> None:
        """Let the answers advance until ``now``. Their speed changes after it."""
        self.progress += (now - self.advanced_at) * 1000 / self.token_ms
        self.advanced_at = now
        self.version += 1


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
            pace = ReportedPace(server.token_ms, server.decode_ms, STREAM_MS, 0.0, 1 << 20)
            instance.learn(HealthReport(pace=pace))

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
            attempt.began()
            began = self.now

            def ended() -> None:
                token_ms = (self.now - began) * 1000 / job.answer_tokens
                self.outcomes.append(Outcome(began - job.at, job.tokens, cached, token_ms))
                close()

            self._answer(decode, job.answer_tokens, ended)

        def close() -> None:
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
        self._set_busy(server, busy=True)

        def done() -> None:
            self._set_busy(server, busy=False)
            computed(cached)
            self._next(instance)

        self._at(self.now + (job.tokens - cached) * PROMPT_MS / 1000, done)

    def _set_busy(self, server: SimServer, *, busy: bool) -> None:
        server.advance(self.now)
        server.is_busy = busy
        self._plan_end(server)

    def _answer(self, instance: Instance, tokens: int, ended: Callable[[], None]) -> None:
        """Let ``instance`` answer with ``tokens`` tokens, and call ``ended`` then."""
        server = self._servers[instance]
        server.advance(self.now)
        heapq.heappush(server.answers, (server.progress + tokens, next(self._number), ended))
        self._plan_end(server)

    def _plan_end(self, server: SimServer) -> None:
        """Plan the end of the next answer of ``server``."""
        if not server.answers:
            return
        version, left = server.version, max(0.0, server.answers[0][0] - server.progress)

        def end() -> None:
            if server.version == version:
                server.advance(self.now)
                heapq.heappop(server.answers)[2]()
                self._plan_end(server)

        self._at(self.now + left * server.token_ms / 1000, end)


def hit_rate(outcomes: list[Outcome]) -> float:
    """Return the share of prompt tokens that were cached."""
    return sum(one.cached for one in outcomes) / sum(one.tokens for one in outcomes)


def percentile(outcomes: list[Outcome], share: float) -> float:
    """Return the time to first token, in seconds, that ``share`` of the requests stay within."""
    return percentile_of([one.seconds for one in outcomes], share)


def percentile_of(values: Iterable[float], share: float) -> float:
    """Return the value that ``share`` of ``values`` stay within."""
    times = sorted(values)
    return times[min(len(times) - 1, int(share * len(times)))]


def tokens_of(jobs: list[Job]) -> int:
    """Return the tokens of all different runs of messages: the size of a cache that would hold everything."""
    runs: Iterator[tuple[Message, ...]] = (job.messages[:n] for job in jobs for n in range(1, len(job.messages) + 1))
    return sum(run[-1].tokens for run in set(runs))
