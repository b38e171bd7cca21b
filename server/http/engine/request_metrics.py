"""Request counts of the HTTP process: like a client, it sees every token and its time.

In a pair, the decode answers the client, so it alone counts the request, its latencies and its tokens. The prefill's
answer to its router is a *leg*. It has metrics of its own, so no sum over instances counts a request twice. A streamed
token costs some 0.6 µs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ....messages.metrics import Histogram, Labelled
from ....messages.outputs import FinishType, Phase, ReqError, ReqMeta, ReqText
from ....runtime.metrics import Metrics, counter, histogram
from .submission import Choice, Kind

SHORT_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06),
    *(0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
"""Histogram buckets of the time between two tokens."""
LONG_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Histogram buckets of the time of a whole request, and of its parts."""
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
"""Histogram buckets of token counts: 1, 2, 5, 10, … 500,000."""
MS = 1000

ERROR, CLIENT_GONE, HANDED_OVER, MOVED = "error", "client_gone", "handed_over", "moved"
ERROR_TYPES = ("invalid_request_error", "overloaded_error", "timeout_error", "transfer_error", "server_error")
"""Error types that are exported from the start: a series that begins with its first error has no rate to alert on."""
REASONS = (*(finish.value for finish in FinishType if finish is not FinishType.DECLINED), ERROR, CLIENT_GONE, MOVED)
LEG_OUTCOMES = (
    *(HANDED_OVER, FinishType.DECLINED.value, FinishType.ABORT.value, FinishType.TIMEOUT.value),
    *(ERROR, CLIENT_GONE, MOVED),
)
"""Outcomes of legs that are exported from the start. Any other outcome is exported once it has been counted."""


class RequestMetrics:
    """Request counts since the start. Event-loop thread only."""

    def __init__(self) -> None:
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.legs: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        """Requests that the engine failed, by error type."""
        self.ttft = Histogram(LONG_SECONDS)
        self.inter_token = Histogram(SHORT_SECONDS)
        self.per_token = Histogram(SHORT_SECONDS)
        self.e2e = Histogram(LONG_SECONDS)
        self.queue = Histogram(LONG_SECONDS)
        self.prefill = Histogram(LONG_SECONDS)
        self.transfer = Histogram(LONG_SECONDS)
        self.decode = Histogram(LONG_SECONDS)
        self.prompt_length = Histogram(TOKENS)
        self.output_length = Histogram(TOKENS)
        self.leg_queue = Histogram(LONG_SECONDS)
        self.leg_prefill = Histogram(LONG_SECONDS)
        self.leg_push = Histogram(LONG_SECONDS)

    def on_text(self, choice: Choice, item: ReqText, now: float) -> None:
        """Count the tokens of ``item`` and their latencies, and the end of the request if it ends with ``item``.

        Call this before ``item`` is added to ``choice``, of which it sets the times of the first and the last token.
        ``now``: ``time.monotonic()``.
        """
        if choice.last_token_at and item.finish is None:
            # The usual case, one more token of a stream. The general code below would do the same.
            if count := len(item.token_ids):
                self.generation_tokens += count
                self._on_tokens(choice, count, now)
            return
        if item.meta is not None:
            choice.goes_by(item.meta.route)
        count = len(item.token_ids) if choice.keep_output else 0
        if count and choice.kind is not Kind.LEG:
            self.generation_tokens += count
            if choice.kind is Kind.STREAM:
                self._on_tokens(choice, count, now)
        if item.finish is not None:
            if choice.kind is Kind.LEG:
                self._leg_ended(item.finish.type, item.meta)
            else:
                self._ended(choice, item, count, now)

    def _on_tokens(self, choice: Choice, count: int, now: float) -> None:
        if choice.last_token_at:
            self.inter_token.observe((now - choice.last_token_at) / count, count)
        else:
            choice.first_token_at = now
            self.ttft.observe(now - choice.arrival)
            if count > 1:
                self.inter_token.observe(0.0, count - 1)
        choice.last_token_at = now

    def _ended(self, choice: Choice, item: ReqText, count: int, now: float) -> None:
        assert item.finish is not None
        self.finished[item.finish.type.value] += 1
        if item.finish.type in (FinishType.ABORT, FinishType.TIMEOUT) or item.meta is None:
            return  # the duration of an answer that was cut short is no latency
        timing, tokens = item.meta.timing, choice.completion_tokens + count
        to_first_token = timing.first_token_ms / MS
        if choice.kind is Kind.WHOLE:
            # Its first token was not seen here.
            choice.first_token_at = choice.arrival + to_first_token
            self.ttft.observe(to_first_token)
        self.e2e.observe(now - choice.arrival)
        self.prompt_length.observe(item.meta.prompt_tokens)
        self.output_length.observe(tokens)
        self.queue.observe(timing.queue_ms / MS)
        self.prefill.observe(timing.prefill_ms / MS)
        self.decode.observe(timing.decode_ms / MS)
        if item.meta.route == "incoming":
            self.transfer.observe(timing.transfer_ms / MS)
        if tokens > 1:
            # A transfer of KV delays the second token, not the first.
            after_first = sum(one.ms for one in timing.phases) - timing.first_token_ms
            self.per_token.observe(max(0.0, after_first) / MS / (tokens - 1))

    def _leg_ended(self, finish: FinishType, meta: ReqMeta | None) -> None:
        if finish is not FinishType.LENGTH or meta is None:
            self.legs[finish.value] += 1
            return
        self.legs[HANDED_OVER] += 1
        # While a leg waits for its decode it is not in this instance's queue.
        waited = sum(p.ms for p in meta.timing.phases if p.phase is Phase.QUEUE and p.at == meta.timing.here)
        self.leg_queue.observe(waited / MS)
        self.leg_prefill.observe(meta.timing.prefill_ms / MS)
        self.leg_push.observe(meta.timing.push_ms / MS)

    def on_error(self, choice: Choice, error: ReqError) -> None:
        """Count the request of ``choice`` as failed, and the engine's ``error``, which ended it, by type."""
        choice.goes_by(error.route)
        self.errors[error.kind] += 1
        self.dropped(choice, ERROR)

    def dropped(self, choice: Choice, why: str) -> None:
        """Count a request that ended without a finish of the engine. ``why``: ``ERROR``, ``CLIENT_GONE`` or ``MOVED``.

        A prefill's leg counts among the legs, not among the requests.
        """
        (self.legs if choice.kind is Kind.LEG else self.finished)[why] += 1


def _shown(names: Iterable[str], counts: Counter[str]) -> Labelled:
    """Return the value of ``counts`` by name, with 0 for each of ``names`` that was not counted yet."""
    return {name: counts[name] for name in dict.fromkeys((*names, *counts))}


METRICS: Metrics[RequestMetrics] = (
    counter("pdserve_generation_tokens_total", "Output tokens that clients were given.", lambda m: m.generation_tokens),
    counter(
        "pdserve_requests_finished_total",
        "Requests of clients that are over, by why.",
        lambda m: _shown(REASONS, m.finished),
        "reason",
        note="Reasons: `stop`, `length`, `abort`, `timeout` (`timeout_s` had passed), `error`, `client_gone`, `moved` "
        "(they go on at another instance, which counts their end).",
    ),
    counter(
        "pdserve_request_errors_total",
        "Requests, and legs, that the engine ended in an error, by its type.",
        lambda m: _shown(ERROR_TYPES, m.errors),
        "type",
        note="The type is that of the error's body. Streams count as well, although their status was 200 already.",
    ),
    counter(
        "pdserve_prefill_legs_finished_total",
        "Prompts computed for other instances that are over, by how.",
        lambda m: _shown(LEG_OUTCOMES, m.legs),
        "outcome",
        note="Outcomes: `handed_over`, `declined` (the decode computes the prompt itself; of a request for several "
        "answers one leg, the others count as `handed_over` at once), `abort`, `timeout`, `error`, `client_gone`, "
        "`moved`.",
    ),
    histogram(
        "pdserve_time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        lambda m: m.ttft,
        note="Without a stream: to when the token was known.",
    ),
    histogram(
        "pdserve_inter_token_latency_seconds",
        "Time between two tokens of a stream.",
        lambda m: m.inter_token,
        note="Several that come together share their gap.",
    ),
    histogram(
        "pdserve_time_per_output_token_seconds",
        "A request's mean time between two tokens.",
        lambda m: m.per_token,
    ),
    histogram("pdserve_e2e_request_latency_seconds", "From a request's arrival to its last token.", lambda m: m.e2e),
    histogram(
        "pdserve_request_queue_seconds",
        "Waiting for memory and a turn, on all instances of a request.",
        lambda m: m.queue,
        note="The phase `queue` of [`timing`](http-api.md#timing).",
    ),
    histogram(
        "pdserve_request_prefill_seconds",
        "From the end of a request's queue to its first token.",
        lambda m: m.prefill,
        note="The phase `prefill`, on whichever instance computed the prompt.",
    ),
    histogram(
        "pdserve_request_transfer_seconds",
        "What a hand-over added to the time to the first token.",
        lambda m: m.transfer,
        note="The phase `transfer`; only of requests that were handed over.",
    ),
    histogram(
        "pdserve_request_decode_seconds",
        "From the first token to the last.",
        lambda m: m.decode,
        note="The phase `decode`. What the four phases leave of `pdserve_e2e_request_latency_seconds` is tokenizing "
        "and the last token's way to HTTP.",
    ),
    histogram("pdserve_request_prompt_tokens", "Prompt lengths.", lambda m: m.prompt_length),
    histogram("pdserve_request_generation_tokens", "Output lengths.", lambda m: m.output_length),
    histogram(
        "pdserve_prefill_leg_queue_seconds",
        "Waiting for memory and a turn, of a leg.",
        lambda m: m.leg_queue,
        note="Without waiting for its decode.",
    ),
    histogram(
        "pdserve_prefill_leg_prefill_seconds",
        "From the end of a leg's queue to its first token.",
        lambda m: m.leg_prefill,
    ),
    histogram(
        "pdserve_prefill_leg_push_seconds",
        "Time that the transfer engine spent on a leg's KV.",
        lambda m: m.leg_push,
    ),
)
