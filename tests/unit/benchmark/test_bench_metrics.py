"""A benchmark's figures, against numpy and against runs small enough to count by hand."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest

from pdserve.benchmark.metrics import GroupReport, Slo, concurrency, distribution, report_run
from pdserve.benchmark.record import RequestRecord
from pdserve.benchmark.runner import RunResult
from pdserve.benchmark.workload import Load, LoadGroup, Workload


def record(sent: float, chunks: list[float], *, group: str = "all", error: str | None = None, **more) -> RequestRecord:
    """Make the record of a request with chunks of one token each at these times."""
    made = RequestRecord(group, more.pop("due", sent), more.pop("output_len", len(chunks)), 10, sent)
    made.ended = more.pop("ended", chunks[-1] if chunks else sent)
    made.chunk_times = array("d", chunks)
    made.chunk_tokens = array("l", more.pop("tokens", [1] * len(chunks)))
    made.completion_tokens = more.pop("completion_tokens", sum(made.chunk_tokens))
    made.prompt_tokens, made.error = 10, error
    assert not more
    return made


def result(records: list[RequestRecord], window: float, duration: float = math.inf, **load) -> RunResult:
    names = dict.fromkeys(r.group for r in records)
    groups = [LoadGroup(name, iter(()), None, None) for name in names]
    return RunResult(Workload("test", Load(**load), groups, [], duration), records, window, 0.5)


def total(records: list[RequestRecord], window: float, slo: Slo | None = None, **more) -> GroupReport:
    return report_run(result(records, window, **more), slo or Slo()).total


def test_distributions_are_numpys() -> None:
    samples = np.random.default_rng(1).exponential(0.02, 1001)
    got = distribution(samples)
    assert got is not None
    expected = np.percentile(samples, [50, 90, 99]) * 1000
    assert (got.median, got.p90, got.p99) == pytest.approx(tuple(expected))
    assert (got.mean, got.max, got.count) == pytest.approx((samples.mean() * 1000, samples.max() * 1000, 1001))
    assert distribution([]) is None


def test_figures_of_random_requests_are_numpys() -> None:
    rng = np.random.default_rng(2)
    times = [np.cumsum(rng.uniform(0.01, 0.1, rng.integers(1, 30))) + i for i in range(50)]
    records = [record(float(i), list(t)) for i, t in enumerate(times)]
    got = total(records, 60.0)
    itl = np.concatenate([np.diff(t) for t in times]) * 1000
    tpot = np.array([(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]) * 1000
    assert got.ttft.mean == pytest.approx(np.mean([(t[0] - i) * 1000 for i, t in enumerate(times)]))
    assert (got.itl.p99, got.itl.count) == pytest.approx((np.percentile(itl, 99), itl.size))
    assert got.tpot.p90 == pytest.approx(np.percentile(tpot, 90))
    assert got.e2e.max == pytest.approx(max(t[-1] - i for i, t in enumerate(times)) * 1000)
    assert got.output_throughput == pytest.approx(sum(map(len, times)) / 60)
    assert got.input_throughput == pytest.approx(500 / 60)


def test_a_chunk_of_several_tokens_is_one_gap_and_several_tokens() -> None:
    got = total([record(0, [0.1, 0.3], tokens=[1, 4])], 1.0)
    assert (got.itl.count, got.itl.max, got.tokens_per_chunk) == (1, pytest.approx(200), 2.5)
    assert got.tpot.mean == pytest.approx(50)
    assert got.output_throughput == 5


def test_failed_requests_are_counted_and_not_measured() -> None:
    records = [
        record(0, [0.1, 0.2]),
        record(0, [9.0], error="boom"),
        record(0, [], error="boom"),
        record(0, [], error="x"),
    ]
    got = total(records, 1.0, Slo(ttft=1000))
    assert (got.requests, got.completed, got.failed) == (4, 1, 3)
    assert list(got.errors.items()) == [("boom", 2), ("x", 1)]
    assert (got.output_throughput, got.ttft.max, got.goodput) == (2, pytest.approx(100), 1)
    assert got.slo_share == 0.25


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft=99), 0),
        (Slo(ttft=101), 2),
        (Slo(tpot=101), 1),
        (Slo(itl=149), 1),
        (Slo(itl=151, e2e=399), 1),
        (Slo(ttft=101, tpot=151, itl=201, e2e=401), 2),
    ],
)
def test_goodput_meets_every_limit(slo: Slo, good: int) -> None:
    # TTFT 100; gaps 100, 100 (TPOT 100, E2E 300), and 100, 200 (TPOT 150, E2E 400).
    records = [record(0, [0.1, 0.2, 0.3]), record(0, [0.1, 0.2, 0.4])]
    assert total(records, 2.0, slo).goodput == good / 2
    assert total(records, 2.0).goodput is None


def test_a_scenario_counts_what_came_within_its_duration() -> None:
    records = [record(0, [0.5, 1.0, 1.5], completion_tokens=6), record(0.5, [2.5], group="long", ended=2.5)]
    report = report_run(result(records, 1.2, duration=1.2), Slo())
    assert [g.name for g in report.groups] == ["all", "long"]
    # Two of three chunks came in time, and the server counts two tokens for each.
    assert report.total.output_throughput == pytest.approx(4 / 1.2)
    assert report.total.request_throughput == 0
    # Latencies are of all that finished, however late.
    assert report.groups[1].ttft.mean == pytest.approx(2000)


def test_concurrency_mean_and_peak() -> None:
    records = [record(0, [1.0]), record(0, [2.0]), record(1.0, [2.0]), record(3.0, [4.0])]
    assert concurrency(records, 4.0) == (pytest.approx((1 + 2 + 1 + 1) / 4), 2)
    assert concurrency([], 0.0) == (0.0, 0)


def test_short_answers_and_a_late_client_are_reported() -> None:
    records = [record(0.3, [1.0], output_len=2, due=0.1), record(0, [1.0])]
    report = report_run(result(records, 1.0), Slo())
    assert (report.total.short_answers, report.client.max_lag) == (1, pytest.approx(200))
    assert report.client.cpu_us_per_token == pytest.approx(250_000)
    # With a limit on concurrency a request waits for its turn, which is not the client's fault.
    assert report_run(result(records, 1.0, rate=2.0, concurrency=1), Slo()).client.max_lag == 0
