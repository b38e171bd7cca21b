"""Reads a page of metrics, with the parser of Prometheus' own library."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pdserve.messages.metrics import (
    DirectionCounts,
    HandoverCounts,
    Histogram,
    KVDebugMetrics,
    PoolUsage,
    PromiseCounts,
    SchedulerMetrics,
    StoreMetrics,
    TierMetrics,
)


class Page:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def names(self) -> set[str]:
        """Of samples, so with _total, _bucket, _sum, _count."""
        return {sample.name for sample in self.samples}

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name with these labels; there must be one."""
        values = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert values, f"no {name} with {labels}"
        return sum(values)

    def labels(self, name: str) -> set[str]:
        """The labels of a name's samples."""
        return {label for sample in self.samples if sample.name == name for label in sample.labels}


def scheduler_metrics(**changes) -> SchedulerMetrics:
    """What a scheduler might say, with every part of it."""
    side = DirectionCounts(open=1, done=2, failed=3, nbytes=4000, seconds=0.5)
    steps = Histogram((0.01, 0.1))
    steps.observe(0.05, 8)
    said = {
        "draining": False,
        "role": "unified",
        "states": {"waiting": 1, "prefilling": 2, "running": 3, "bootstrapping": 4, "sending": 5},
        "pool": PoolUsage(total=100, free=50, cached=30, in_use=20),
        "prompt_tokens": 70,
        "cached_tokens": 30,
        "recomputed_tokens": 5,
        "decode_tokens": 40,
        "asked_tokens": 100,
        "hit_tokens": 30,
        "retractions": 1,
        "preemptions": 0,
        "followers": 2,
        "step_seconds": steps,
        "cost_model_error": 0.25,
        "promises": PromiseCounts(steps=10, late=1),
        "tiers": TierMetrics(
            host_total=200,
            host_used=90,
            saved=120,
            loaded=60,
            stored=110,
            fetched=40,
            asked=50,
            skipped=2,
            hit_host=12,
            hit_store=8,
            copy_seconds=0.25,
            fetch_seconds=0.5,
            store_seconds=0.75,
            store=StoreMetrics("open", 110, 4096, 1, 3),
        ),
        "handovers": HandoverCounts(sent=side, received=side, peers=1, refused=6),
        "kv_debug": KVDebugMetrics({"reuse": 7, "store": 4}, {"reuse": 0, "store": 2}),
    }
    return SchedulerMetrics(**(said | changes))
