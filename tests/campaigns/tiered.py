"""A mix of one instance with tiers behind its pool: host memory and a store that dies, beside everything else.

Priorities with preemption, fair shares, forks, deadlines, namespaces, log-probabilities, bad logits, flushes, aborts,
resizes, every policy of scheduling, eviction, writing and fetching. Pages are looked at in some (``kv_debug``).
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest.mock import patch

import msgspec
from support.sim import NO_WINDOW, SimWindow, make_generate, reference_output
from support.sim_resize import ResizedTieredSim
from support.world.world import Violation

from pdserve.messages.memory import ResizeReq
from pdserve.messages.outputs import FinishType, ReqError
from pdserve.messages.requests import AbortReq, LogprobOptions
from pdserve.messages.worker import ForwardStep, StepResult
from pdserve.scheduler import store_link

from .instances import POLICIES, Report

ACTS = 250
"""Things that happen in a whole campaign."""
SIZES = (112, 128, 176, 256)
"""Tokens of the pool: what the longest request needs, and more."""
LENGTHS = (1, 7, 20, 33, 40, 60)
BAD_LOGITS = 0.01
WINDOW = SimWindow(16, 64)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "page_size": (1, 4, 16),
    "max_total_tokens": (128, 176),
    "hicache_write_policy": ("write_through", "write_through_selective", "write_back"),
    "hicache_storage_prefetch_policy": ("best_effort", "wait_complete", "timeout"),
    "enable_priority_scheduling": (False, True),
    "priority_scheduling_preemption_threshold": (0, 3),
    "fair_scheduling": (False, True),
    "schedule_conservativeness": (0.0, 1.0),
    "schedule_policy": POLICIES,
    "radix_eviction_policy": ("lru", "lfu", "slru", "mru", "priority"),
    "itl_budget_ms": (0, 0.35, 40),
    "disable_overlap_schedule": (False, False, False, True),
    "kv_debug": (False, True),
}


class TieredCampaign:
    """One instance and its clients. ``answers`` is what each open request should be told."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        options = {name: rng.choice(values) for name, values in OPTIONS.items()}
        # Windows go with this write policy alone.
        windowed = options["hicache_write_policy"] == "write_through" and rng.random() < 0.5
        options |= {"max_total_tokens_limit": max(SIZES), "chunked_prefill_size": 16}
        self.sim = ResizedTieredSim(
            rng.choice((2, 16, 200)), store=rng.random() < 0.5, window=WINDOW if windowed else NO_WINDOW, **options
        )
        self.answers: dict[str, tuple[list[int], int]] = {}
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.submitted = 0
        self._bad_rate = rng.choice((0.0, 0.0, BAD_LOGITS))
        self._run = self.sim.worker.run
        self.sim.worker.run = self._spoil  # type: ignore[method-assign]

    def run(self, acts: int) -> None:
        """Let ``acts`` things happen, and then everything end. Raises ``AssertionError``."""
        kinds = [self.submit, self.turns, self.abort, self.resize, self.serve, self.wait, self.flush, self.toggle_store]
        for _ in range(acts):
            [act] = self.rng.choices(kinds, (30, 40, 6, 6, 8, 3, 2, 2))
            act()
            self.check()
        self.sim.store.dead = False
        self.sim.settle()
        self.check()
        if self.answers:
            raise Violation(f"requests never ended: {sorted(self.answers)}")
        usage = self.sim.scheduler.memory.pool.usage()
        if usage["in_use"] or usage["rows_in_use"] or usage.get("window_in_use", 0):
            raise Violation(f"memory was not given back: {usage}")

    # --- what happens ---

    def submit(self) -> None:
        """Submit a prompt of a family that shares its beginning, and further answers to it."""
        rng, family = self.rng, self.rng.randrange(4)
        prompt = [(i * 7 + family * 31) % 97 if family < 3 else 5 for i in range(rng.choice(LENGTHS))]
        prompt += [rng.randrange(4)] * rng.randrange(4)
        output = rng.randint(1, 24)
        first = msgspec.structs.replace(
            make_generate(f"r{self.submitted}", prompt, max_new_tokens=output),
            extra_key=rng.choice(("", "", "x", "yy")),
            priority=rng.choice((0, 0, 2, 5, 9)),
            key_name=rng.choice("AB"),
            user=rng.choice(("", "u", "v")),
            arrival=self.sim.now,
            timeout_s=rng.choice((0, 0, 0, 0.02, 1.0)),
            logprobs=LogprobOptions(rng.choice((-1, 0, 3))) if rng.random() < 0.15 else None,
        )
        self.submitted += 1
        for i in range(1 + rng.choice((0, 0, 0, 1, 3))):
            rid = f"{first.rid}-fork{i}" if i else first.rid
            self.answers[rid] = prompt, output
            msg = msgspec.structs.replace(first, rid=rid, fork_of=first.rid if i else "")
            self.sim.scheduler.arrivals.admit(msg, self.sim.now)

    def turns(self) -> None:
        """Let the scheduler and the worker go on for some ticks."""
        for _ in range(self.rng.randint(1, 12)):
            self.sim.plan()
            self.sim.work()

    def abort(self) -> None:
        """Abort a request, as when its client leaves."""
        if self.sim.scheduler.reqs:
            rid = self.rng.choice(sorted(self.sim.scheduler.reqs))
            self.answers.pop(rid, None)
            self.sim.scheduler.abort(AbortReq(rid, "its client left"))

    def resize(self) -> None:
        """Resize the pool."""
        self.events["resizes"] += 1
        order = ResizeReq(self.rng.choice(SIZES), self.rng.choice((0.0, 0.005, 100.0)), id=1)
        self.sim.ask(order)

    def serve(self) -> None:
        """Let the store serve some of its commands."""
        for _ in range(self.rng.randint(1, 6)):
            self.sim.serve_store()

    def wait(self) -> None:
        """Time passes."""
        self.sim.now += self.rng.choice((0.1, 1.0, 20.0))

    def flush(self) -> None:
        """Flush the cache, whatever is under way."""
        self.events["flushes"] += 1
        self.sim.scheduler.memory.flush()

    def toggle_store(self) -> None:
        """Kill the store, or bring it back."""
        self.sim.store.dead = self.rng.random() < 0.5
        self.events["store deaths"] += self.sim.store.dead

    def _spoil(self, step: ForwardStep) -> StepResult:
        result = self._run(step)
        if self.rng.random() < self._bad_rate:
            result.bad_entries = [self.rng.randrange(len(step.rows) // 4)]
            self.events["bad logits"] += 1
        return result

    # --- what must hold ---

    def check(self) -> None:
        """Check that every page has an owner, no page changed unseen, and ended requests had the right output."""
        sim = self.sim
        sim.scheduler.check_invariants()
        for rid in [rid for rid in self.answers if rid in sim.ends]:
            self._check_end(rid, *self.answers.pop(rid))
        sim.answers.clear()
        debug = sim.scheduler.memory.debug
        if debug.enabled and not self.events["bad logits"] and sum(debug.mismatches.values()):
            raise Violation(f"pages are not what they were: {debug.info()}")

    def _check_end(self, rid: str, prompt: list[int], output: int) -> None:
        end, output_ids = self.sim.ends[rid], self.sim.tokens.get(rid, [])
        if output_ids != reference_output(prompt, output)[: len(output_ids)]:
            raise Violation(f"wrong KV was used for {rid}: {output_ids}")
        if isinstance(end, ReqError):
            # 429 and 408: too many requests, and a deadline.
            if end.status not in (408, 429) and not (end.status == 500 and self.events["bad logits"]):
                raise Violation(f"{rid} failed although nothing went wrong: {end.status} {end.message}")
            self.outcomes[f"error {end.status}"] += 1
            return
        assert end.finish is not None
        # A pool that gets smaller cuts what a request may come to.
        cut = len(prompt) + len(output_ids) >= min(SIZES) - self.sim.options.page_size
        if end.finish.type is FinishType.LENGTH and len(output_ids) != output and not cut:
            raise Violation(f"{rid} ended with {len(output_ids)} of {output} tokens")
        self.outcomes["timed out" if end.finish.type is FinishType.TIMEOUT else "finished"] += 1


class Tiered:
    """See the module."""

    def play(self, seed: int, length: int | None = None) -> Report:
        """See ``Mix``. There are no hand-overs: four things happen for each that ``length`` says."""
        # Prompts are short here: everything that can be fetched is.
        with patch.object(store_link, "LEAST_FETCH", 4):
            campaign = TieredCampaign(seed)
            campaign.run(ACTS if length is None else 4 * length)
        return Report(0, campaign.outcomes, campaign.events, 0.0)
