"""An instance's ``/metrics``: what its scheduler and its HTTP process count, as Prometheus families.

Names are ``pdserve_*`` after Prometheus' conventions; docs/metrics.md lists them beside vLLM's and SGLang's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from ...messages.memory import ALL_TAGS
from ...messages.metrics import ChoiceCounts, DirectionCounts, SchedulerMetrics, StoreMetrics, TierMetrics
from ...runtime.options import ServerOptions
from ...runtime.web.access_log import AccessCounts
from ...runtime.web.exposition import Families
from .engine_client import EngineClient
from .metric_aliases import ALIASES, HIT_RATE, THROUGHPUT, Alias, Growth, aliased
from .request_metrics import ERROR_TYPES, LEG_OUTCOMES, REASONS, RequestMetrics

BREAKER_STATES = ("closed", "open", "half-open")
PRESSURES = ("none", "some", "high")
"""``scheduler/pressure.py`` says what they mean."""


class InstanceMetrics:
    """Makes the families of each scrape. Every sample of pdserve's own has the instance's ``role``."""

    def __init__(
        self, options: ServerOptions, engine: EngineClient, visits: AccessCounts, info: Mapping[str, str]
    ) -> None:
        self._options = options
        self._engine = engine
        self._visits = visits
        self._info = info
        self._aliases: tuple[Alias, ...] = ALIASES[options.metrics_aliases]
        self._throughput = Growth(base=time.monotonic(), least=1.0)
        self._hit_rate = Growth(base=0.0, least=1.0)

    def families(self) -> Iterable[Metric]:
        """All of them, the aliases last."""
        families = Families({"role": self._engine.role})
        families.gauge(
            "pdserve_instance_info",
            "Always 1; says which instance this is.",
            {tuple(self._info.values()): 1},
            *self._info,
        )
        add_requests(families, self._engine.metrics)
        add_front(families, self._visits, self._engine.live_requests)
        scheduler = self._engine.scheduler_metrics
        if scheduler is not None:
            add_scheduler(families, scheduler)
            add_steps(families, scheduler)
            add_handovers(families, scheduler)
            add_tiers(families, scheduler)
            add_kv_debug(families, scheduler)
        if not self._aliases:
            return families.made
        labels = {"model_name": self._options.model_name}
        return [*families.made, *aliased([*families.made, *self._between_scrapes()], self._aliases, labels)]

    def _between_scrapes(self) -> Iterable[Metric]:
        """What only aliases show: whoever has our counters has better."""
        families = Families({})
        rate = self._throughput.ratio(self._engine.metrics.generation_tokens, time.monotonic())
        families.gauge(THROUGHPUT, "Output tokens a second since the last scrape.", rate)
        if (scheduler := self._engine.scheduler_metrics) is not None:
            ratio = self._hit_rate.ratio(scheduler.hit_tokens, scheduler.asked_tokens)
            families.gauge(HIT_RATE, "Share of prompt tokens that were cached since the last scrape.", ratio)
        return families.made


def add_requests(families: Families, counts: RequestMetrics) -> None:
    """What clients were served, and the legs of what others served."""
    families.counter(
        "pdserve_generation_tokens_total", "Output tokens that clients were given.", counts.generation_tokens
    )
    families.counter(
        "pdserve_requests_finished_total",
        "Requests of clients that are over, by why.",
        {(reason,): counts.finished[reason] for reason in {**dict.fromkeys(REASONS), **counts.finished}},
        "reason",
    )
    families.counter(
        "pdserve_request_errors_total",
        "Requests, and legs, that the engine ended in an error, by its type.",
        {(kind,): counts.errors[kind] for kind in {**dict.fromkeys(ERROR_TYPES), **counts.errors}},
        "type",
    )
    families.counter(
        "pdserve_prefill_legs_finished_total",
        "Prompts computed for other instances that are over, by how.",
        {(outcome,): counts.legs[outcome] for outcome in {**dict.fromkeys(LEG_OUTCOMES), **counts.legs}},
        "outcome",
    )
    for name, meaning, histogram in (
        ("time_to_first_token_seconds", "From a request's arrival to its first token.", counts.ttft),
        ("inter_token_latency_seconds", "Between two tokens of a stream.", counts.inter_token),
        ("time_per_output_token_seconds", "A request's mean time between two tokens.", counts.per_token),
        ("e2e_request_latency_seconds", "From a request's arrival to its last token.", counts.e2e),
        ("request_queue_seconds", "Waiting for memory and a turn, on all instances of a request.", counts.queue),
        ("request_prefill_seconds", "From there to the first token.", counts.prefill),
        ("request_transfer_seconds", "What a hand-over added to the time to the first token.", counts.transfer),
        ("request_decode_seconds", "From the first token to the last.", counts.decode),
        ("request_prompt_tokens", "Prompt lengths.", counts.prompt_length),
        ("request_generation_tokens", "Output lengths.", counts.output_length),
        ("prefill_leg_queue_seconds", "Waiting for memory and a turn, of a leg.", counts.leg_queue),
        ("prefill_leg_prefill_seconds", "From there to the first token, of a leg.", counts.leg_prefill),
        ("prefill_leg_push_seconds", "Time that the transfer engine spent on a leg's KV.", counts.leg_push),
    ):
        families.histogram(f"pdserve_{name}", meaning, histogram)


def add_front(families: Families, visits: AccessCounts, live_requests: int) -> None:
    """What the HTTP process itself does."""
    families.counter(
        "pdserve_http_responses_total",
        "Answers of any kind; 499: the client left before there was one.",
        {(method, path, str(status)): count for (method, path, status), count in visits.responses.items()},
        "method",
        "path",
        "status",
    )
    families.gauge("pdserve_http_requests_in_flight", "HTTP requests that are not answered yet.", visits.in_flight)
    families.gauge("pdserve_live_requests", "Requests that the engine has not ended.", live_requests)


def add_scheduler(families: Families, counts: SchedulerMetrics) -> None:
    """Queues, memory and prompts."""
    families.gauge("pdserve_draining", "1 while the instance admits nothing more.", int(counts.draining))
    families.gauge(
        "pdserve_requests",
        "Requests in the scheduler by state.",
        {(state,): count for state, count in counts.states.items()},
        "state",
    )
    pool = counts.pool
    families.gauge("pdserve_kv_pool_size_tokens", "KV pool, in tokens.", pool.total)
    families.gauge(
        "pdserve_kv_pool_tokens",
        "KV pool by use: free, cached (no request needs it), in_use.",
        {("free",): pool.free, ("cached",): pool.cached, ("in_use",): pool.in_use},
        "state",
    )
    families.gauge("pdserve_kv_pool_usage_ratio", "Share of the KV pool that requests need.", pool.in_use / pool.total)
    families.gauge(
        "pdserve_kv_pressure",
        "1 at the level of how short KV memory is: none, some (under a quarter can be had), high.",
        {(level,): int(level == counts.pressure) for level in PRESSURES},
        "level",
    )
    families.gauge(
        "pdserve_memory_released",
        "1 for memory that was given back, which makes the instance unready.",
        {(tag,): int(tag in counts.released) for tag in ALL_TAGS},
        "tag",
    )
    families.counter(
        "pdserve_prompt_tokens_total",
        "Prompt tokens by where they came from: computed here, or cached here for a prompt computed here.",
        {("computed",): counts.prompt_tokens, ("cached",): counts.cached_tokens},
        "source",
    )
    families.counter(
        "pdserve_recomputed_tokens_total", "Tokens computed again after a retraction.", counts.recomputed_tokens
    )
    families.counter(
        "pdserve_compiled_kernels_total",
        "GPU kernels compiled while serving, each of which stalled all streams.",
        counts.compiled_kernels,
    )
    families.counter(
        "pdserve_prefix_cache_asked_tokens_total",
        "Tokens looked up in the prefix cache.",
        counts.asked_tokens,
    )
    families.counter("pdserve_prefix_cache_hit_tokens_total", "Those of them that were there.", counts.hit_tokens)
    families.counter(
        "pdserve_retractions_total", "How often a running request lost its memory to others.", counts.retractions
    )
    families.counter(
        "pdserve_preemptions_total",
        "Those of them that were for the sake of a higher priority.",
        counts.preemptions,
    )
    families.counter(
        "pdserve_shared_prompts_total",
        "Requests that waited for the prompt of another one that begins alike.",
        counts.followers,
    )


def add_steps(families: Families, counts: SchedulerMetrics) -> None:
    """Forward passes."""
    families.histogram("pdserve_step_duration_seconds", "Forward passes.", counts.step_seconds)
    prefill = counts.prompt_tokens + counts.recomputed_tokens
    families.counter(
        "pdserve_step_tokens_total",
        "Tokens that went through the model, wanted or not.",
        {("prefill",): prefill, ("decode",): counts.decode_tokens},
        "phase",
    )
    if counts.promises is not None:
        kept = counts.promises.steps - counts.promises.late
        families.counter(
            "pdserve_itl_budget_steps_total",
            "Steps with prompts that streams waited for, by whether they kept --itl-budget-ms.",
            {("kept",): kept, ("broken",): counts.promises.late},
            "outcome",
        )
    if counts.cost_model_error is not None:
        families.gauge(
            "pdserve_cost_model_error_ratio",
            "Median error of the last steps' foreseen times, relative to these.",
            counts.cost_model_error,
        )


def add_handovers(families: Families, counts: SchedulerMetrics) -> None:
    """KV that moves. What is sent and what is received have names of their own: a sum never counts a byte twice."""
    handovers = counts.handovers
    if handovers is None:
        return
    families.counter("pdserve_kv_sent_bytes_total", "KV sent to other instances.", handovers.sent.nbytes)
    families.counter("pdserve_kv_push_seconds_total", "Time spent sending it.", handovers.sent.seconds)
    families.counter("pdserve_kv_received_bytes_total", "KV received from other instances.", handovers.received.nbytes)
    _add_side(families, "sent", handovers.sent)
    _add_side(families, "received", handovers.received)
    families.counter(
        "pdserve_handovers_recomputed_total",
        "Hand-overs that failed behind their first token, so that the prompt was computed here.",
        handovers.received.recomputed,
    )
    moves = handovers.moves
    families.counter(
        "pdserve_requests_moved_total",
        "Running requests that were to go on at another instance, or came from one.",
        {
            ("out", "done"): moves.out,
            ("out", "failed"): moves.out_failed,
            ("in", "done"): moves.in_,
            ("in", "failed"): moves.in_failed,
        },
        "direction",
        "outcome",
    )
    families.counter(
        "pdserve_moved_pause_seconds_total",
        "Time that requests which left stood still on the way.",
        moves.paused_seconds,
    )
    families.counter(
        "pdserve_kv_returned_total",
        "Finished requests whose KV was given back to a prefill, or was taken from a decode.",
        {("out",): moves.returned, ("in",): moves.kept},
        "direction",
    )
    _add_choices(families, handovers.choices)
    first = handovers.store_first
    families.counter(
        "pdserve_handover_fetches_total",
        "Prompts of which this decode asked its own store before a prefill, by what became of it.",
        {("came",): first.came, ("late",): first.late, ("lost",): first.lost},
        "outcome",
    )
    families.counter(
        "pdserve_handover_fetched_tokens_total",
        "Prompt tokens whose KV that brought, instead of a prefill.",
        first.tokens,
    )
    families.gauge("pdserve_handover_peers", "Instances that are connected to exchange KV.", handovers.peers)
    families.counter(
        "pdserve_control_refusals_total", "Frames and connections that the control plane refused.", handovers.refused
    )


def add_tiers(families: Families, counts: SchedulerMetrics) -> None:
    """KV beyond the pool."""
    tiers = counts.tiers
    if tiers is None:
        return
    families.gauge(
        "pdserve_kv_host_tokens",
        "KV in host memory, behind the pool: used, and free.",
        {("used",): tiers.host_used, ("free",): tiers.host_total - tiers.host_used},
        "state",
    )
    families.counter(
        "pdserve_prefix_cache_beyond_tokens_total",
        "Those of the prefix cache's hits that were not in the pool, by the tier that had them.",
        {("host",): tiers.hit_host, ("store",): tiers.hit_store},
        "tier",
    )
    families.counter(
        "pdserve_kv_tier_tokens_total",
        "KV copied between tiers.",
        {
            ("pool", "host"): tiers.saved,
            ("host", "pool"): tiers.loaded,
            ("host", "store"): tiers.stored,
            ("store", "host"): tiers.fetched,
        },
        "source",
        "target",
    )
    families.counter(
        "pdserve_kv_tier_seconds_total",
        "Time spent on that: copies between pool and host hold up steps, what the store takes does not.",
        {("copy",): tiers.copy_seconds, ("store",): tiers.store_seconds, ("fetch",): tiers.fetch_seconds},
        "work",
    )
    if tiers.store is not None:
        _add_store(families, tiers, tiers.store)


def add_kv_debug(families: Families, counts: SchedulerMetrics) -> None:
    """With ``--kv-debug``."""
    if (debug := counts.kv_debug) is None:
        return
    families.counter(
        "pdserve_kv_debug_compared_pages_total",
        "Pages whose hashes were compared, by where.",
        {(place,): count for place, count in debug.compared.items()},
        "place",
    )
    families.counter(
        "pdserve_kv_debug_mismatches_total",
        "Hashes of a layer's keys or values in a page that were not what they had been.",
        {(place,): count for place, count in debug.mismatches.items()},
        "place",
    )


def _add_store(families: Families, tiers: TierMetrics, store: StoreMetrics) -> None:
    families.gauge(
        "pdserve_kv_store_state",
        "1 for the state that the store's breaker is in: closed (asked), open (left alone), half-open (tried).",
        {(state,): int(state == store.breaker) for state in BREAKER_STATES},
        "state",
    )
    families.counter("pdserve_kv_store_asked_tokens_total", "KV that the store was asked for.", tiers.asked)
    families.counter(
        "pdserve_kv_store_skipped_tokens_total", "KV that came faster than the store took it.", tiers.skipped
    )
    families.counter(
        "pdserve_kv_store_bad_pages_total", "Pages found damaged or another's, and dropped.", store.bad_pages
    )
    families.counter("pdserve_kv_store_evicted_pages_total", "Pages dropped to make room.", store.evicted_pages)
    if store.tokens is not None:
        families.gauge("pdserve_kv_store_tokens", "KV in the store, as far as this instance knows.", store.tokens)
    if store.nbytes is not None:
        families.gauge("pdserve_kv_store_bytes", "The same in bytes.", store.nbytes)


def _add_choices(families: Families, choices: ChoiceCounts) -> None:
    """Where prompts were computed, of those that either of two instances could."""
    here, there = choices.here, choices.there
    families.counter(
        "pdserve_prompt_places_total",
        "Prompts by who was to compute them: this decode itself (here), or its prefill (there).",
        {("here",): here.prompts, ("there",): there.prompts},
        "place",
    )
    families.counter(
        "pdserve_first_token_foreseen_seconds_total",
        "Time to their first tokens, as it was foreseen when that was decided.",
        {("here",): here.predicted_seconds, ("there",): there.predicted_seconds},
        "place",
    )
    families.counter(
        "pdserve_first_token_came_seconds_total",
        "Time to these first tokens, as it was.",
        {("here",): here.actual_seconds, ("there",): there.actual_seconds},
        "place",
    )


def _add_side(families: Families, side: str, counts: DirectionCounts) -> None:
    families.counter(
        f"pdserve_handovers_{side}_total",
        f"Hand-overs {side} that are over.",
        {("done",): counts.done, ("failed",): counts.failed},
        "outcome",
    )
    families.gauge(f"pdserve_handovers_{side}_open", f"Hand-overs {side} that are under way.", counts.open)
