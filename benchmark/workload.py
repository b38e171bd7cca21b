"""From options to groups of requests with their arrivals, one workload for each load that is measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .arrivals import burst_arrivals, random_arrivals
from .options import BenchOptions
from .prompts import PromptShape, RequestSpec, Seed, TokenRange, random_requests
from .scenario import Scenario, ScenarioGroup, read_scenario
from .texts import read_texts, text_requests
from .trace import TraceReplay, read_trace

DEFAULT_PROMPTS = 100
DEFAULT_OUTPUT_LEN = 128
_WARMUP_STREAM, _ARRIVAL_STREAM, _FIRST_GROUP_STREAM = 0, 1, 2


@dataclass(frozen=True)
class Load:
    """One point of a sweep. ``rate`` in requests/s; infinite with a ``concurrency`` is a closed loop."""

    rate: float = math.inf
    concurrency: int | None = None

    @property
    def label(self) -> str:
        """Return the load's name for reports, such as "4 req/s, concurrency 8"."""
        rate = "" if math.isinf(self.rate) else f"{self.rate:g} req/s"
        limit = f"concurrency {self.concurrency}" if self.concurrency else ""
        return ", ".join(filter(None, (rate, limit))) or "all at once"


@dataclass(frozen=True)
class LoadGroup:
    """Requests that are reported together.

    ``arrivals``: when each is sent (seconds from the start); None is a closed loop of ``concurrency`` clients between
    ``start`` and ``end``. With ``arrivals``, ``concurrency`` limits how many are under way. ``count``: how many there
    are, where that is known.
    """

    name: str
    requests: Iterator[RequestSpec]
    arrivals: Iterator[float] | None
    concurrency: int | None
    count: int | None = None
    start: float = 0.0
    end: float = math.inf


@dataclass(frozen=True)
class Workload:
    """What one run sends. ``duration``: seconds after which nothing new is sent; infinite: groups end themselves."""

    label: str
    load: Load
    groups: list[LoadGroup]
    warmup: list[RequestSpec]
    duration: float = math.inf


class WorkloadSource:
    """Reads the files once and builds the workload of each load."""

    def __init__(self, options: BenchOptions) -> None:
        """Read the files that ``options`` name. Raises ``WorkloadError``."""
        self._options = options
        self._tokens = TokenRange(options.min_token_id, options.max_token_id)
        self._scenario: Scenario | None = None if options.scenario is None else read_scenario(options.scenario)
        path, limit = options.dataset_path, options.num_prompts
        self._trace = read_trace(path, limit) if options.dataset == "trace" and path else []
        self._texts: list[RequestSpec] = []
        if options.dataset == "text" and path:
            self._texts = text_requests(read_texts(path, limit), options.tokenizer, options.output_len)

    @property
    def loads(self) -> list[Load]:
        """Return the loads to measure: every request rate with every limit of concurrency.

        Without --request-rate the rate is infinite. Without --max-concurrency the limit is None, which is no limit.
        """
        rates = self._options.request_rate or [math.inf]
        limits: list[int] | list[None] = self._options.max_concurrency or [None]
        return [Load(rate, limit) for rate, limit in itertools.product(rates, limits)]

    def build(self, step: int, load: Load) -> Workload:
        """Build the workload of one load. ``step``: its number in the sweep.

        Each load has random prompts of its own, but the texts of a file are the same for all.
        """
        seed = (self._options.seed, step)
        if self._scenario is not None:
            return self._build_scenario(self._scenario, seed)
        requests, arrivals, count = self._requests(seed, load)
        group = LoadGroup("all", requests, arrivals, load.concurrency, count)
        return Workload(load.label, load, [group], self._warmup([self._shape()], seed))

    def _requests(self, seed: Seed, load: Load) -> tuple[Iterator[RequestSpec], Iterator[float] | None, int]:
        options = self._options
        if self._trace:
            replay = TraceReplay(self._tokens, (*seed, _FIRST_GROUP_STREAM), options.length_scale, options.time_scale)
            traced = replay.replay(self._trace)
            return (t.spec for t in traced), (t.at for t in traced), len(traced)
        count = len(self._texts) or options.num_prompts or DEFAULT_PROMPTS
        endless = random_requests(self._shape(), self._tokens, (*seed, _FIRST_GROUP_STREAM))
        requests: Iterable[RequestSpec] = self._texts or itertools.islice(endless, count)
        if math.isinf(load.rate) and load.concurrency:
            return iter(requests), None, count
        arrivals = random_arrivals(load.rate, options.burstiness, (*seed, _ARRIVAL_STREAM))
        return iter(requests), arrivals, count

    def _shape(self) -> PromptShape:
        o = self._options
        output_len = o.output_len or DEFAULT_OUTPUT_LEN
        return PromptShape(o.input_len, output_len, o.range_ratio, o.prefix_len, o.prefix_share, o.num_prefixes)

    def _warmup(self, shapes: list[PromptShape], seed: Seed) -> list[RequestSpec]:
        """Draw the warm-up requests, of each shape in turn. They share no prompts with the measured ones."""
        streams = [random_requests(shape, self._tokens, (*seed, _WARMUP_STREAM, i)) for i, shape in enumerate(shapes)]
        return [next(stream) for stream in itertools.islice(itertools.cycle(streams), self._options.warmup_requests)]

    def _build_scenario(self, scenario: Scenario, seed: Seed) -> Workload:
        groups = [
            self._scenario_group(group, scenario.duration, (*seed, 2 + i)) for i, group in enumerate(scenario.groups)
        ]
        warmup = self._warmup([group.shape for group in scenario.groups], seed)
        return Workload(str(self._options.scenario), Load(), groups, warmup, scenario.duration)

    def _scenario_group(self, group: ScenarioGroup, duration: float, seed: Seed) -> LoadGroup:
        arrivals: Iterator[float] | None = None
        if group.rate is not None:
            arrivals = random_arrivals(group.rate, group.burstiness, (*seed, _ARRIVAL_STREAM), group.start)
        elif group.every is not None:
            arrivals = burst_arrivals(group.every, group.burst, group.start)
        end = duration if group.end is None else min(group.end, duration)
        requests = random_requests(group.shape, self._tokens, seed)
        return LoadGroup(group.name, requests, arrivals, group.concurrency, None, group.start, end)
