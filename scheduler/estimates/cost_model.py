"""What a step will take: the one model that everything asks that has to foresee it, learned while serving.

``estimate`` gives the expected ``forward_ms`` of a step of some ``StepShape``; ``learn`` is told the outcome of each.
The ITL budget sizes prompt pieces with it, and ``/server_info`` shows it.

**The form.** A step's time is a sum of terms that can only grow: a constant, a piecewise linear function of the tokens
that go through the linear layers, and a rate each for requests that decode, for KV tokens that they read, and for the
attention pairs of prompt pieces. All weights are at least 0, so the estimate is monotone in each input and never
negative. The function of tokens has its knots where processors change: a processor is bound by memory for the first
tokens (every weight is read once, so the next token is almost free) and by arithmetic behind them, and the CPU kernels
choose another strategy above 48 tokens, which may be a step in the curve; hence the knots 48 and 49. It need not be
convex: better use of the caches by a larger step is a real thing.

**The fit.** Non-negative least squares of relative errors, weighted by Huber's rule: a step beside which another
process ran took three times as long and means nothing. Steps are forgotten by *region* (so many tokens, with or without
prompts): a step makes those of its own region fade, no others, so that an hour of decodes alone doesn't make the model
forget what prompts cost. Where a whole batch of steps in known regions was off the same way, the machine itself has
become slower or faster, and everything that is known is scaled.

**What was never seen** is taken to cost in proportion: on no machine does a step of twice the tokens take longer than
two steps, so a segment's slope is at most the cost per token at its beginning. That is far too much while memory is the
bound, but errs on the side that keeps promises, and shrinks with the first steps that come near.

**Which time is learned.** Not the gap that a client sees, the time between the results of two steps. With overlap two
steps are under way, so that gap begins at a moment that depends on the step before, and contains the scheduler's own
delays, of which the shape of a step says nothing. ``forward_ms`` is taken around the pass alone and depends on the
shape. What a gap has beyond it (messages, a worker that waits for its next step) is learned beside it, as
``overhead_ms``.

Costs some 35 µs a step on two busy cores of 2.5 GHz, most of it at every ``REFIT_STEPS``-th and behind the messages
that somebody waits for (``catch_up``; ``python -m pdserve.benchmark.cost_model`` measures it).
Deterministic: the same outcomes give the same model.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...messages.worker import MeasuredStep, WorkerReady
from ...runtime.metrics import Metrics, gauge
from .non_negative import F64, solve_non_negative
from .step_shape import StepShape

KNOTS = (0, 8, 16, 32, 48, 49, 64, 128, 256, 512, 2048)
"""Tokens; behind the last one the function goes on straight."""
LENGTHS = (*(b - a for a, b in pairwise(KNOTS)), KNOTS[-1])
SEGMENTS = len(KNOTS)
CONSTANT, FIRST_SEGMENT, DECODES, KV, PAIRS = 0, 1, SEGMENTS + 1, SEGMENTS + 2, SEGMENTS + 3
COUNT = SEGMENTS + 4
DECODE_UNIT, KV_UNIT, PAIR_UNIT = 8.0, 4096.0, 131072.0
"""Weights are of so many decodes, KV tokens and pairs, so that all are some milliseconds."""

PRIOR_MS = 20.0
"""A step of one token, before anything is known."""
PRIOR_WEIGHT = 1e-3
"""Of what is assumed, where one observed step weighs 1."""
MEMORY_STEPS = 64
"""A region forgets over so many steps of its own."""
IMPATIENCE = 0.25
"""It forgets faster where estimates are bad: this share of the typical error at each step."""
HUBER = 4.0
"""Errors count in full up to so many times the typical one."""
MAX_STRETCH = 1.5
"""Errors are relative to the estimate, but to one that is at most so many times off: the first ones mean nothing."""
ERROR_GAIN = 1.1
"""The typical error moves by this factor towards each error: it ends up where half of them are larger."""
MIN_ERROR, MAX_ERROR = 0.02, 1.0
EAGER_STEPS, REFIT_STEPS = 16, 16
"""The model is fitted anew at each of the first steps, then at every so many, when ``catch_up`` is called."""
MAX_NEWS = 4 * REFIT_STEPS
"""It is fitted where it stands once so many steps are not in it."""
CHANGE, KNOWN = 0.2, 8
"""The whole machine has changed its speed where half of the new steps are off by more than this, the same way, in
regions of which so many steps are known."""
OVERHEAD_STEPS = 16
RECENT = 256
MIN_MS = 1e-3

_STARTS = np.array(KNOTS, dtype=np.float64)
_LENGTHS = np.array(LENGTHS, dtype=np.float64)
_CAPS = np.array([1.0] * (SEGMENTS - 1) + [np.inf])


class _Outcome(NamedTuple):
    """A step's time. ``error``: relative to the estimate. ``weight``: how far it is believed."""

    shape: StepShape
    ms: float
    error: float
    weight: float

    @property
    def scale(self) -> float:
        """Milliseconds by which the fit counts its error."""
        return self.ms * min(max(1 / (1 + self.error), 1 / MAX_STRETCH), MAX_STRETCH)

    @property
    def region(self) -> int:
        """Which steps it replaces as time goes on."""
        return bisect_right(KNOTS, self.shape.tokens) - 1 + (SEGMENTS if self.shape.prompt_tokens else 0)


def _features(shapes: Sequence[StepShape]) -> F64:
    """[N, COUNT]: what the weights of the model multiply."""
    counts = np.array(shapes, dtype=np.float64)
    x = np.empty((len(counts), COUNT))
    x[:, CONSTANT] = 1.0
    tokens = counts[:, 0] + counts[:, 2]
    x[:, FIRST_SEGMENT:DECODES] = np.minimum(np.maximum((tokens[:, None] - _STARTS) / _LENGTHS, 0.0), _CAPS)
    x[:, DECODES:] = counts[:, (0, 1, 3)] / (DECODE_UNIT, KV_UNIT, PAIR_UNIT)
    return x


def _assumptions() -> F64:
    """[A, COUNT]: rows whose product with the weights is assumed to be 0.

    First one a segment: tokens at its beginning times its slope, less the cost at its beginning. Then one a rate.
    """
    rows = np.zeros((SEGMENTS + COUNT - DECODES, COUNT))
    rows[:SEGMENTS] = -_AT_KNOTS
    for i, knot in enumerate(KNOTS):
        rows[i, FIRST_SEGMENT + i] += max(knot, 1) / LENGTHS[i]
    # That rates are 0 only decides between what explains the steps equally well.
    rows[SEGMENTS:, DECODES:] = np.eye(COUNT - DECODES) * math.sqrt(PRIOR_WEIGHT)
    return rows


_AT_KNOTS = _features([StepShape(prompt_tokens=knot) for knot in KNOTS]) * ([1.0] * DECODES + [0.0] * (COUNT - DECODES))
# Relative, as errors are: to the cost at the segment's beginning, and that of a small step for the rates.
_ASSUMED_AT = _AT_KNOTS[[*range(SEGMENTS), 0, 0, 0]]
_ASSUMED = PRIOR_WEIGHT * np.array([np.outer(row, row).ravel() for row in _assumptions()])


class CostModel:
    """See the module. ``kv_ms``: what reading the KV of one token may take, as far as it is known beforehand."""

    def __init__(self, measured: Iterable[MeasuredStep] = (), kv_ms: float = 0.0) -> None:
        self.steps = 0
        self.overhead_ms = 0.0
        self._kv_prior = kv_ms * KV_UNIT
        self._typical_error = MAX_ERROR
        self._recent_errors: deque[float] = deque(maxlen=RECENT)
        self._moments = np.zeros((2 * SEGMENTS, COUNT + 1, COUNT + 1))
        """Of each region: sums of products of features and outcome, which is the last of each axis."""
        self._seen = [0] * (2 * SEGMENTS)
        """Steps of each region that the moments have held."""
        self._news: list[_Outcome] = []
        """What the moments don't hold yet."""
        self._weights = np.zeros(COUNT)
        self._weights[CONSTANT] = PRIOR_MS
        self._fit()
        for step in measured:
            shape = StepShape(step.decodes, step.kv_tokens, step.prompt_tokens, step.prompt_pairs)
            ms = max(step.forward_ms, MIN_MS)
            self._news.append(_Outcome(shape, ms, ms / self.estimate(shape) - 1, 1.0))
            self._fit()

    def estimate(self, shape: StepShape) -> float:
        """Expected ``forward_ms``."""
        tokens = shape.decodes + shape.prompt_tokens
        i = bisect_right(KNOTS, tokens) - 1
        return (
            self._at_knots[i]
            + self._slopes[i] * (tokens - KNOTS[i])
            + self._per_decode * shape.decodes
            + self._per_kv_token * shape.kv_tokens
            + self._per_pair * shape.prompt_pairs
        )

    def tokens_within(self, limit_ms: float, shape: StepShape, start: int, most: int) -> int:
        """How long a further prompt piece from ``start`` on may be, at most ``most``, for an estimate within the limit.

        0 where not even one token is.
        """
        if most <= 0 or self.estimate(shape.with_piece(start, 1)) > limit_ms:
            return 0
        low, high = 1, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.estimate(shape.with_piece(start, middle)) <= limit_ms:
                low = middle
            else:
                high = middle
        return low

    def learn(self, shape: StepShape, forward_ms: float, foreseen_ms: float) -> None:
        """A step is done. ``foreseen_ms``: what ``estimate`` said as it was planned, by which the model is judged."""
        self.steps += 1
        self._recent_errors.append(forward_ms / foreseen_ms - 1)
        ms, typical = max(forward_ms, MIN_MS), self._typical_error
        error = ms / self.estimate(shape) - 1
        self._news.append(_Outcome(shape, ms, error, min(1.0, HUBER * typical / max(abs(error), MIN_ERROR))))
        typical = typical * ERROR_GAIN if abs(error) > typical else typical / ERROR_GAIN
        self._typical_error = min(max(typical, MIN_ERROR), MAX_ERROR)
        if self.steps < EAGER_STEPS or len(self._news) >= MAX_NEWS:
            self._fit()

    def catch_up(self) -> None:
        """Fit the model anew where it is due: half a millisecond, for a moment in which nobody waits."""
        if len(self._news) >= REFIT_STEPS:
            self._fit()

    def learn_overhead(self, ms: float) -> None:
        """What the time between two results had beyond the second step's ``forward_ms``."""
        allowed = max(self.overhead_ms, 0.1)
        self.overhead_ms += min(max(ms - self.overhead_ms, -allowed), allowed) / OVERHEAD_STEPS

    @property
    def median_error(self) -> float | None:
        """Half of the last steps were off by less, relative to their estimate; None before the first."""
        errors = sorted(map(abs, self._recent_errors))
        return errors[len(errors) // 2] if errors else None

    def info(self) -> dict[str, Any]:
        """JSON-ready: the parameters, and how far estimates were off lately."""
        error = self.median_error
        return {
            "steps": self.steps,
            "median_error": None if error is None else round(error, 4),
            "overhead_ms": round(self.overhead_ms, 4),
            "ms_at_tokens": {str(k): round(ms, 4) for k, ms in zip(KNOTS, self._at_knots, strict=True)},
            "ms_per_token_beyond": round(self._slopes[-1], 6),
            "ms_per_decode": round(self._per_decode, 6),
            "ms_per_1000_kv_tokens": round(self._per_kv_token * 1e3, 6),
            "ms_per_million_pairs": round(self._per_pair * 1e6, 6),
        }

    def _fit(self) -> None:
        self._take_news()
        total = self._moments.sum(axis=0)
        a, b = total[:COUNT, :COUNT], total[:COUNT, COUNT]
        self._assume(a, b)
        w = self._weights = solve_non_negative(a, b, self._weights)
        # A floor that is added keeps the order of any two estimates; the larger of the two would not.
        self._at_knots: list[float] = (_AT_KNOTS @ w + MIN_MS).tolist()
        self._slopes: list[float] = (w[FIRST_SEGMENT:DECODES] / _LENGTHS).tolist()
        self._per_decode = float(w[DECODES]) / DECODE_UNIT
        self._per_kv_token = float(w[KV]) / KV_UNIT
        self._per_pair = float(w[PAIRS]) / PAIR_UNIT

    def _take_news(self) -> None:
        if not self._news:
            return
        self._follow_the_machine()
        z = np.empty((len(self._news), COUNT + 1))
        z[:, :COUNT] = _features([o.shape for o in self._news])
        z[:, COUNT] = [o.ms for o in self._news]
        z /= np.array([[o.scale] for o in self._news])
        regions: dict[int, list[int]] = {}
        for i, outcome in enumerate(self._news):
            regions.setdefault(outcome.region, []).append(i)
        weights = np.array([o.weight for o in self._news])
        forget = 1 - max(1 / MEMORY_STEPS, IMPATIENCE * self._typical_error)
        for region, members in regions.items():
            count = len(members)
            rows, faded = z[members], weights[members] * forget ** np.arange(count - 1, -1, -1)
            self._seen[region] += count
            self._moments[region] *= forget**count
            self._moments[region] += rows.T @ (rows * faded[:, None])
        self._news = []

    def _follow_the_machine(self) -> None:
        """Where everything has become slower or faster, what was known of all regions still holds in proportion."""
        errors = sorted(o.error for o in self._news if self._seen[o.region] >= KNOWN)
        middle = errors[len(errors) // 2] if len(errors) >= REFIT_STEPS // 2 else 0.0
        if abs(middle) > CHANGE:
            self._moments[:, COUNT] *= 1 + middle
            self._moments[:, :, COUNT] *= 1 + middle

    def _assume(self, a: F64, b: F64) -> None:
        """Add what holds until steps say otherwise."""
        costs = np.maximum(_ASSUMED_AT @ self._weights, MIN_MS)
        a += (costs**-2.0 @ _ASSUMED).reshape(COUNT, COUNT)
        if self._kv_prior:
            a[KV, KV] += PRIOR_WEIGHT / self._kv_prior**2
            b[KV] += PRIOR_WEIGHT / self._kv_prior
        # All of the above says nothing of milliseconds. This does, so faintly that one observed step silences it.
        a[CONSTANT, CONSTANT] += PRIOR_WEIGHT**2 / PRIOR_MS**2
        b[CONSTANT] += PRIOR_WEIGHT**2 / PRIOR_MS


def make_cost_model(worker: WorkerReady) -> CostModel:
    """With what the worker measured before the first request came."""
    kv_ms = 0.0
    if worker.measured and worker.step_weight_bytes:
        # A small step reads the weights once; KV comes from the same memory, hardly faster.
        bytes_per_ms = worker.step_weight_bytes / min(m.forward_ms for m in worker.measured)
        kv_ms = worker.layout.page_bytes / worker.layout.page_size / bytes_per_ms
    return CostModel(worker.measured, kv_ms)


METRICS: Metrics[CostModel] = (
    gauge(
        "pdserve_cost_model_error_ratio",
        "Median error of the last steps' estimated times, relative to the estimates.",
        lambda m: m.median_error,
        note="Absent before the first step.",
    ),
)
