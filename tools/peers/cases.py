"""What is measured: each case is a command line of ``pdserve bench serve``, and the figures that matter of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A figure of a run's report. ``path``: where in the JSON; the group "short" is ``("groups", "short", …)``."""

    title: str
    path: tuple[str, ...]
    is_rate: bool = False

    def read(self, report: Mapping[str, Any]) -> float | None:
        """Return the metric's value in ``report``, or None if the run lacks it. Rates are per second, others in ms."""
        value: Any = report
        for key in self.path:
            if isinstance(value, list):
                value = next((item for item in value if item["name"] == key), None)
            elif value is not None:
                value = value[key]
        return None if value is None else float(value)

    def ratio(self, ours: float, theirs: float) -> float:
        """Return how many times better ``ours`` is: above 1 is better, whether the metric is a rate or a time."""
        return ours / theirs if self.is_rate else theirs / ours


OUTPUT = Metric("output tok/s", ("total", "output_throughput"), is_rate=True)
INPUT = Metric("input tok/s", ("total", "input_throughput"), is_rate=True)
TTFT = Metric("mean TTFT, ms", ("total", "ttft", "mean"))
TPOT = Metric("mean TPOT, ms", ("total", "tpot", "mean"))
ITL_P50 = Metric("P50 ITL, ms", ("total", "itl", "median"))
ITL_P99 = Metric("P99 ITL, ms", ("total", "itl", "p99"))
SHORT_ITL_P50 = Metric("P50 ITL of the streams, ms", ("groups", "short", "itl", "median"))
SHORT_ITL_P99 = Metric("P99 ITL of the streams, ms", ("groups", "short", "itl", "p99"))
SHORT_TTFT = Metric("P50 TTFT of the streams, ms", ("groups", "short", "ttft", "median"))
LONG_TTFT = Metric("P50 TTFT of the long prompts, ms", ("groups", "long", "ttft", "median"))
UNDONE = Metric("requests left undone", ("total", "failed"))
GOODPUT = Metric("goodput, requests/s", ("total", "goodput"), is_rate=True)


@dataclass(frozen=True)
class Case:
    """``args``: of ``pdserve bench serve``; ``metrics``: what the tables show, the most important first.

    ``may_leave_undone``: an engine that can't keep up with the load has failed requests, which is a figure of its own.
    """

    name: str
    title: str
    args: tuple[str, ...]
    metrics: tuple[Metric, ...]
    may_leave_undone: bool = False


def _random(input_len: int, output_len: int, prompts: int, concurrency: int, *more: str) -> tuple[str, ...]:
    shape = ("--input-len", str(input_len), "--output-len", str(output_len), "--num-prompts", str(prompts))
    # As many warm-up requests as run at a time, so that a server has seen the batch size that is measured.
    return (*shape, "--max-concurrency", str(concurrency), "--warmup-requests", str(concurrency), *more)


# A reader follows 20 tokens a second, and sees a gap of a fifth of a second.
MIXED_SLO = {"TTFT": 3000, "TPOT": 50, "ITL": 200}
_SLO_FLAGS = tuple(word for name, limit in MIXED_SLO.items() for word in (f"--slo-{name.lower()}-ms", str(limit)))

SINGLE = Case("decode-1", "32/128, 4 requests, one at a time", _random(32, 128, 4, 1), (OUTPUT, TPOT, TTFT, ITL_P99))
EIGHT = Case("batch-8", "256/128, 32 requests, 8 at a time", _random(256, 128, 32, 8), (OUTPUT, TTFT, TPOT, ITL_P99))
SIXTEEN = Case("batch-16", "512/64, 32 requests, 16 at a time", _random(512, 64, 32, 16), (OUTPUT, ITL_P99, TTFT, TPOT))
PREFILL = Case("prefill", "512/1, 16 requests, one at a time", _random(512, 1, 16, 1), (INPUT, TTFT))
PREFIX = Case(
    "prefix",
    "512 shared tokens + 64/64, 32 requests, 8 at a time",
    _random(64, 64, 32, 8, "--prefix-len", "512"),
    (OUTPUT, TTFT, TPOT, ITL_P99),
)
LONG = Case("long", "4,000/64, 4 requests, one at a time", _random(4000, 64, 4, 1), (OUTPUT, TTFT, TPOT))
MIXED = Case(
    "mixed",
    "mixed load: 8 streams of 64/200; three prompts of 1,500/4 every 3 s; 40 s",
    ("--scenario", "mixed", "--warmup-requests", "4", *_SLO_FLAGS),
    (SHORT_ITL_P99, SHORT_ITL_P50, SHORT_TTFT, LONG_TTFT, OUTPUT, GOODPUT, UNDONE),
    may_leave_undone=True,
)
CASES = {case.name: case for case in (SINGLE, EIGHT, SIXTEEN, PREFILL, PREFIX, LONG, MIXED)}
