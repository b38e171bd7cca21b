"""The figures of a run, as the field defines them.

- **TTFT**: from sending a request to the first chunk of the answer that carries a token.
- **ITL**: the gap between two successive chunks that carry tokens. Each gap is one sample, so P99 ITL is what a reader
  of the stream sees. A chunk with several tokens is one chunk here (``tokens_per_chunk`` reveals a server that groups
  them). Spreading its gap over its tokens would hide the wait.
- **TPOT**: (last chunk - first chunk) / (output tokens - 1) of one request.
- **E2E**: from sending to the last chunk that carries a token.
- **Throughput**: tokens or requests of complete answers over the window. The window is from the first request to the
  last complete answer, or a scenario's duration. Only answers within it count.
- **Goodput**: requests a second that meet every SLO given. A failed request never does.

Tokens are counted by the server (``usage``, ``meta_info``) where it does, else as chunks. All times in ms here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from .record import RequestRecord
from .runner import RunResult

MS = 1e3


class Distribution(msgspec.Struct, frozen=True):
    """Distribution of one kind of sample, in ms."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True):
    """Limits in ms; None: any. ``itl`` limits the longest gap of a request, ``tpot`` its mean time per token."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @property
    def is_given(self) -> bool:
        """Return whether there is any limit."""
        return any(limit is not None for limit in (self.ttft, self.tpot, self.itl, self.e2e))

    def is_met(self, record: RequestRecord) -> bool:
        """Return whether this request succeeded and met every limit, so that it counts for goodput.

        A latency between tokens that an answer of one token lacks counts as 0.
        """
        if record.error is not None:
            return False
        measured = (record.ttft, record.tpot or 0.0, max(record.itls, default=0.0), record.e2e)
        limits = (self.ttft, self.tpot, self.itl, self.e2e)
        return all(limit is None or value * MS <= limit for value, limit in zip(measured, limits, strict=True))


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on one group of requests, or on all. Throughputs are per second. Distributions are None without samples.

    ``short_answers`` counts complete answers with fewer tokens than asked for. ``goodput`` and ``slo_share`` are None
    without an SLO.
    """

    name: str
    requests: int
    completed: int
    failed: int
    errors: dict[str, int]
    short_answers: int
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    tokens_per_chunk: float | None
    request_throughput: float
    input_throughput: float
    output_throughput: float
    mean_concurrency: float
    peak_concurrency: int
    goodput: float | None
    slo_share: float | None
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None


class ClientCost(msgspec.Struct, frozen=True):
    """What the load generator itself took. ``max_lag``: the longest that a request was sent after its time, in ms."""

    cpu_seconds: float
    cpu_us_per_token: float | None
    max_lag: float


class RunReport(msgspec.Struct, frozen=True):
    """Report on one load. ``window`` is in seconds."""

    label: str
    rate: float | None
    concurrency: int | None
    window: float
    total: GroupReport
    groups: list[GroupReport]
    client: ClientCost


@dataclass(frozen=True)
class _Window:
    """What counts for rates. ``is_cut``: only what arrives before ``seconds`` counts."""

    seconds: float
    is_cut: bool

    def per_second(self, count: float) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0

    def output_tokens(self, record: RequestRecord) -> float:
        if not self.is_cut:
            return record.completion_tokens
        within = np.frombuffer(record.chunk_times) <= self.seconds
        tokens = np.asarray(record.chunk_tokens)
        # Chunks may count for less than the server's own total (see ``CompletionReader``): scale to that.
        return float(tokens[within].sum()) * record.completion_tokens / float(tokens.sum())


def report_run(result: RunResult, slo: Slo) -> RunReport:
    """Compute the figures of ``result``, for all requests and for each group. Latencies are in ms."""
    load = result.workload.load
    window = _Window(result.window, np.isfinite(result.workload.duration).item())
    names = [group.name for group in result.workload.groups]
    groups = [report_group(n, [r for r in result.records if r.group == n], window, slo) for n in names]
    total = groups[0] if len(groups) == 1 else report_group("all", result.records, window, slo)
    received = sum(sum(record.chunk_tokens) for record in result.records)
    lag = max((r.sent - r.due for r in result.records), default=0.0) if load.concurrency is None else 0.0
    cost = ClientCost(result.cpu_seconds, result.cpu_seconds * 1e6 / received if received else None, lag * MS)
    rate = load.rate if np.isfinite(load.rate) else None
    return RunReport(result.workload.label, rate, load.concurrency, result.window, total, groups, cost)


def report_group(name: str, records: Sequence[RequestRecord], window: _Window, slo: Slo) -> GroupReport:
    """Compute the figures of ``records`` under the name ``name``.

    ``window``: the time that rates are taken over. If it is cut, what arrives after it does not count for rates.
    """
    done = [record for record in records if record.error is None]
    finished = [r for r in done if not window.is_cut or r.ended <= window.seconds]
    good = sum(slo.is_met(record) for record in finished)
    chunks = sum(len(record.chunk_times) for record in done)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    mean_concurrency, peak_concurrency = concurrency(records, window.seconds)
    return GroupReport(
        name=name,
        requests=len(records),
        completed=len(done),
        failed=len(records) - len(done),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        short_answers=sum(record.completion_tokens < record.output_len for record in done),
        input_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(record.completion_tokens for record in done),
        tokens_per_chunk=sum(record.completion_tokens for record in done) / chunks if chunks else None,
        request_throughput=window.per_second(len(finished)),
        input_throughput=window.per_second(sum(record.prompt_tokens for record in finished)),
        output_throughput=window.per_second(sum(window.output_tokens(record) for record in done)),
        mean_concurrency=mean_concurrency,
        peak_concurrency=peak_concurrency,
        goodput=window.per_second(good) if slo.is_given else None,
        slo_share=sum(map(slo.is_met, records)) / len(records) if slo.is_given and records else None,
        ttft=distribution(record.ttft for record in done),
        itl=distribution(gap for record in done for gap in record.itls),
        tpot=distribution(tpot for record in done if (tpot := record.tpot) is not None),
        e2e=distribution(record.e2e for record in done),
    )


def distribution(seconds: Iterable[float]) -> Distribution | None:
    """Compute the distribution, in ms, of samples in seconds; None without samples.

    Percentiles are interpolated linearly between samples.
    """
    samples = np.fromiter(seconds, np.float64) * MS
    if not samples.size:
        return None
    median, p90, p99 = (float(value) for value in np.percentile(samples, (50, 90, 99)))
    return Distribution(samples.size, float(samples.mean()), median, p90, p99, float(samples.max()))


def concurrency(records: Sequence[RequestRecord], seconds: float) -> tuple[float, int]:
    """Return the mean and the maximum number of requests under way.

    The mean is over ``seconds`` from the first request's start.
    """
    if not records or seconds <= 0:
        return 0.0, 0
    begin = min(record.sent for record in records)
    # A request that ends exactly when another begins makes room for it: ends sort first.
    changes = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    under_way = np.cumsum([change for _, change in changes])
    busy = sum(max(0.0, min(r.ended, begin + seconds) - r.sent) for r in records)
    return busy / seconds, int(under_way.max())
