"""Reads a page of metrics, with the parser of Prometheus' own library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.disaggregation.handover import (
    kv_manager,
    peers,
    placement_policy,
    receiver_table,
    sender_table,
    store_first,
)
from pdserve.messages.metrics import Family, Histogram, SchedulerMetrics
from pdserve.messages.tiers import StoreState
from pdserve.runtime.metrics import read
from pdserve.runtime.web.prometheus import exposed
from pdserve.scheduler import (
    counters,
    itl_budget,
    kv_debug,
    memory_terms,
    planner,
    shared_prompts,
    store_link,
    tiers,
)
from pdserve.scheduler.estimates import cost_model
from pdserve.scheduler.feature import Feature
from pdserve.scheduler.features import memory_saver, metrics_report, pressure
from pdserve.scheduler.features.handovers import HandoverFeature
from pdserve.scheduler.features.kv_hashes import KVHashing
from pdserve.scheduler.features.tiers import TierFeature
from pdserve.scheduler.kv_debug import Place
from pdserve.scheduler.req import ReqState
from pdserve.scheduler.scheduler import Scheduler


class Page:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def names(self) -> set[str]:
        """Return the names of samples, with _total, _bucket, _sum and _count."""
        return {sample.name for sample in self.samples}

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of that name with these labels. There must be one."""
        values = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert values, f"no {name} with {labels}"
        return sum(values)

    def labels(self, name: str) -> set[str]:
        """Return the labels of a name's samples."""
        return {label for sample in self.samples if sample.name == name for label in sample.labels}


class Owner(SimpleNamespace):
    """Stand-in for the owner of counts. A count that it was not given is 0."""

    def __getattr__(self, name: str) -> int:
        return 0


def page_of(families: Collection[Family]) -> Page:
    """Return the page that shows ``families``."""
    return Page(generate_latest(SimpleNamespace(collect=lambda: exposed(families, {}))).decode())


def metrics_of(scheduler: Scheduler) -> Page:
    """Return the page of what ``scheduler`` counts now."""
    return page_of(families_of(scheduler))


def parts_of(scheduler: Scheduler) -> list[Feature]:
    """Return the parts of an instance that report figures of the scheduler's own parts."""
    hashing = KVHashing(scheduler.memory, scheduler.worker.layout, scheduler.outbox)
    return [
        HandoverFeature(scheduler.handovers, scheduler.instance_role, lambda: scheduler.has_freed),
        TierFeature(scheduler.tiers),
        hashing,
    ]


def families_of(scheduler: Scheduler) -> list[Family]:
    """Return what ``scheduler`` and its parts count now."""
    return metrics_report.take_metrics(scheduler) + [f for part in parts_of(scheduler) for f in part.metrics(0.0)]


def scheduler_metrics(without: Collection[str] = ()) -> SchedulerMetrics:
    """Return a report with all metrics that a scheduler can have, but those of the parts named in ``without``."""
    families = [f for part, owned in PARTS.items() if part not in without for one in owned for f in read(*one)]
    return SchedulerMetrics("unified", families)


def requests(**states: int) -> dict[str, Owner]:
    """Make stand-ins for requests, this many in each state."""
    each = [ReqState(state) for state, count in states.items() for _ in range(count)]
    return {str(i): Owner(state=state) for i, state in enumerate(each)}


STEPS = Histogram((0.01, 0.1))
STEPS.observe(0.05, 8)
COUNTERS = Owner(
    prompt_tokens=70, recomputed_tokens=5, decode_tokens=40, step_seconds=STEPS, steps=8, compiled_kernels=0
)
PLANNED = Owner(cached_tokens=30, asked_tokens=100, hit_tokens=30, retraction=Owner(count=1, preemptions=0))
HELD = Owner(
    draining=False,
    reqs=requests(waiting=1, prefilling=2, running=3, bootstrapping=4, sending=5),
    counters=COUNTERS,
    planner=PLANNED,
)
DIRECTION = {"done": 2, "failed": 3, "rooms": range(1)}
MOVES = Owner(done=0, failed=0, paused_seconds=0.0, returns=Owner(given=0), kept=0)
PLACE = Owner(prompts=0, predicted_seconds=0.0, actual_seconds=0.0)
TIER_COUNTS = Owner(
    **{"saved": 60, "loaded": 30, "stored": 55, "fetched": 20, "asked": 25, "skipped": 1},
    **{"hit_host": 12, "hit_store": 8, "copy_seconds": 0.25, "fetch_seconds": 0.5, "store_seconds": 0.75},
)


class Host:
    """A host tier of 100 pages, of which 45 are used."""

    num_pages = 100

    def __len__(self) -> int:
        return 45


PARTS = {
    "scheduler": [
        (metrics_report.METRICS, HELD),
        (memory_terms.METRICS, {"total": 100, "free": 50, "cached": 30, "in_use": 20}),
        (counters.METRICS, COUNTERS),
        (planner.METRICS, PLANNED),
        (shared_prompts.METRICS, Owner(set_aside=2)),
        (pressure.METRICS, pressure.Pressure.NONE),
        (memory_saver.METRICS, Owner(released=[])),
    ],
    "itl_budget": [(itl_budget.METRICS, Owner(steps=10, steps_over=1))],
    "cost_model": [(cost_model.METRICS, Owner(median_error=0.25))],
    "handovers": [
        (sender_table.METRICS, Owner(pushes=Owner(bytes_sent=4000, push_seconds=0.5, **DIRECTION), **DIRECTION)),
        (receiver_table.METRICS, Owner(bytes_received=4000, recomputed=0, **DIRECTION)),
        (kv_manager.METRICS, Owner(moves_out=MOVES, moves_in=MOVES)),
        (placement_policy.METRICS, Owner(here=PLACE, there=PLACE)),
        (store_first.METRICS, store_first.StoreFirstCounts()),
        (peers.METRICS, Owner(table=Owner(connected=1), refused=6)),
    ],
    "tiers": [
        (tiers.METRICS, Owner(host=Host(), page_size=2, counts=TIER_COUNTS)),
        (
            store_link.METRICS,
            Owner(state=StoreState("open", "", 55, 4096, 1, 3), page_size=2, counts=TIER_COUNTS),
        ),
    ],
    "kv_debug": [
        (
            kv_debug.METRICS,
            Owner(compared=Counter({Place.REUSE: 7, Place.STORE: 4}), mismatches=Counter({Place.STORE: 2})),
        )
    ],
}
"""Tables of metrics, each with a stand-in for what it reads, by the part of the scheduler that may be left out."""
