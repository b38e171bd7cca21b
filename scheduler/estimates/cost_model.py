"""Estimates how long a step takes: the one model of steps that all estimates use, learned while serving.

``estimate`` gives the expected ``forward_ms`` of a step of some ``StepShape``; ``learn`` takes the outcome of each.
The ITL budget sizes prompt pieces with it, and ``/server_info`` shows it.

**The form.** A step's time is a sum of terms that can only grow. They are a constant, a piecewise linear function of
the tokens in the linear layers, and three rates. The rates are for decoding requests, for the KV tokens that they read,
and for the attention pairs of prompt pieces. All weights are at least 0, so the estimate is monotone in each input and
never negative.

The function of tokens has its knots where processors change. A processor is bound by memory for the first tokens: every
weight is read once, so the next token is almost free. After them it is bound by arithmetic. The CPU kernels choose
another strategy above 48 tokens, which may be a step in the curve; hence the knots 48 and 49. The function need not be
convex: a larger step may use the caches better.

**The fit.** Non-negative least squares of relative errors, weighted by Huber's rule. A step that took three times as
long because another process ran beside it means nothing. Steps are forgotten by *region* (a range of tokens, with or
without prompts). A step makes only those of its own region fade, so an hour of decodes alone doesn't make the model
forget what prompts cost. If a whole batch of steps in known regions was off the same way, the machine itself has become
slower or faster. Then everything that is known is scaled.

**What was never seen** is assumed to cost in proportion. On no machine does a step of twice the tokens take longer than
two steps. So a segment's slope is at most the cost per token at its beginning. That is far too much while memory is the
bound. But it errs on the side that keeps promises, and shrinks with the first steps that come near.

**Which time is learned.** Not the gap that a client sees, the time between the results of two steps. With overlap two
steps are under way, so that gap begins at a moment that depends on the step before. It also contains the scheduler's
own delays, which do not depend on the shape of a step. ``forward_ms`` is taken around the pass alone and depends on the
shape. The rest of a gap (messages, a worker that waits for its next step) is learned beside it, as ``overhead_ms``.

Costs about 35 µs a step on two busy cores of 2.5 GHz. Most of it falls on every ``REFIT_STEPS``-th step, after urgent
messages are sent (``catch_up``; ``python -P -m tools.cost_model`` measures it). Deterministic: the same
outcomes give the same model.
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

KNOTS = (0, 8, 16, 32, 48, 49, 64, 128, 256, 512, 2048)
"""Knots of the piecewise linear function, in tokens. After the last one the function continues straight."""
LENGTHS = (*(b - a for a, b in pairwise(KNOTS)), KNOTS[-1])
SEGMENTS = len(KNOTS)
CONSTANT, FIRST_SEGMENT, DECODES, KV, PAIRS = 0, 1, SEGMENTS + 1, SEGMENTS + 2, SEGMENTS + 3
COUNT = SEGMENTS + 4
DECODE_UNIT, KV_UNIT, PAIR_UNIT = 8.0, 4096.0, 131072.0
"""Units of the weights: decodes, KV tokens and pairs, chosen so that all weights are some milliseconds."""

PRIOR_MS = 20.0
"""Milliseconds of a step of one token, before anything is known."""
PRIOR_WEIGHT = 1e-3
"""Weight of an assumption; one observed step weighs 1."""
MEMORY_STEPS = 64
"""Number of its own steps over which a region forgets."""
IMPATIENCE = 0.25
"""Share of the typical error that a region forgets at each step, so that it forgets faster if estimates are bad."""
HUBER = 4.0
"""Multiple of the typical error up to which errors count in full."""
MAX_STRETCH = 1.5
"""Maximum factor between a step's time and the scale of its error: the first estimates mean nothing."""
ERROR_GAIN = 1.1
"""Factor by which the typical error moves towards each error. It settles where half of the errors are larger."""
MIN_ERROR, MAX_ERROR = 0.02, 1.0
EAGER_STEPS, REFIT_STEPS = 16, 16
"""Number of first steps that each refit the model, and number of steps between later fits in ``catch_up``."""
MAX_OUTCOMES = 4 * REFIT_STEPS
"""Maximum steps outside the model: with more, it is fitted at once."""
CHANGE, KNOWN = 0.2, 8
"""Condition for a change of the whole machine's speed.

Half of the new steps are off by more than ``CHANGE``, the same way, in regions with at least ``KNOWN`` known steps.
"""
OVERHEAD_STEPS = 16
RECENT = 256
MIN_MS = 1e-3
"""Least milliseconds of a step. A clock may show 0 for a short one."""

_STARTS = np.array(KNOTS, dtype=np.float64)
_LENGTHS = np.array(LENGTHS, dtype=np.float64)
_CAPS = np.array([1.0] * (SEGMENTS - 1) + [np.inf])


class StepShape(NamedTuple):
    """A step in four counts, whatever its entries.

    ``decodes``: requests that compute one token. ``kv_tokens``: tokens of KV that their attention reads.
    ``prompt_tokens``: tokens of all prompt pieces. ``prompt_pairs``: query-key pairs of the pieces' attention, which
    are ``q * (start + q / 2)`` for ``q`` tokens from position ``start`` on.
    """

    decodes: int = 0
    kv_tokens: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that go through the linear layers: one of each decoding request, and all prompt tokens."""
        return self.decodes + self.prompt_tokens

    @property
    def decodes_alone(self) -> StepShape:
        """This step without its prompt pieces."""
        return StepShape(self.decodes, self.kv_tokens)

    def with_piece(self, start: int, length: int) -> StepShape:
        """Return this step with ``length`` more prompt tokens, from position ``start`` of their prompt on."""
        pairs = self.prompt_pairs + length * (start + length / 2)
        return StepShape(self.decodes, self.kv_tokens, self.prompt_tokens + length, pairs)


class _Outcome(NamedTuple):
    """Time of a step. ``error``: relative to the estimate. ``weight``: how far it is trusted."""

    shape: StepShape
    ms: float
    error: float
    weight: float

    @property
    def scale(self) -> float:
        """Milliseconds by which the fit divides the step, so that relative errors count.

        It is the estimate, but within a factor of ``MAX_STRETCH`` of the time measured.
        """
        return self.ms * min(max(1 / (1 + self.error), 1 / MAX_STRETCH), MAX_STRETCH)

    @property
    def region(self) -> int:
        """Index of the step's region, which is its range of tokens, with or without prompt tokens."""
        return bisect_right(KNOTS, self.shape.tokens) - 1 + (SEGMENTS if self.shape.prompt_tokens else 0)


def _features(shapes: Sequence[StepShape]) -> F64:
    """Return [N, COUNT]: for each shape the factors of the model's weights, the sum of which is the estimate."""
    counts = np.array(shapes, dtype=np.float64)
    x = np.empty((len(counts), COUNT))
    x[:, CONSTANT] = 1.0
    tokens = counts[:, 0] + counts[:, 2]
    x[:, FIRST_SEGMENT:DECODES] = np.minimum(np.maximum((tokens[:, None] - _STARTS) / _LENGTHS, 0.0), _CAPS)
    x[:, DECODES:] = counts[:, (0, 1, 3)] / (DECODE_UNIT, KV_UNIT, PAIR_UNIT)
    return x


def _assumptions() -> F64:
    """Return [A, COUNT]: rows with a product with the weights that is assumed to be 0.

    First one for each segment: tokens at its beginning times its slope, less the cost at its beginning. Then one for
    each rate.
    """
    rows = np.zeros((SEGMENTS + COUNT - DECODES, COUNT))
    rows[:SEGMENTS] = -_AT_KNOTS
    for i, knot in enumerate(KNOTS):
        rows[i, FIRST_SEGMENT + i] += max(knot, 1) / LENGTHS[i]
    # Rates of 0 only decide between solutions that explain the steps equally well.
    rows[SEGMENTS:, DECODES:] = np.eye(COUNT - DECODES) * math.sqrt(PRIOR_WEIGHT)
    return rows


_AT_KNOTS = _features([StepShape(prompt_tokens=knot) for knot in KNOTS]) * ([1.0] * DECODES + [0.0] * (COUNT - DECODES))
# Scales of the assumptions, which are relative as errors are: the cost at the segment's beginning, and that of a small
# step for the rates.
_ASSUMED_AT = _AT_KNOTS[[*range(SEGMENTS), 0, 0, 0]]
_ASSUMED = PRIOR_WEIGHT * np.array([np.outer(row, row).ravel() for row in _assumptions()])


class CostModel:
    """The learned model of steps; see the module. ``kv_ms``: assumed time to read the KV of one token, 0 if unknown."""

    def __init__(self, measured: Iterable[MeasuredStep] = (), kv_ms: float = 0.0) -> None:
        self.steps = 0
        self.overhead_ms = 0.0
        self._kv_prior = kv_ms * KV_UNIT
        self._typical_error = MAX_ERROR
        self._recent_errors: deque[float] = deque(maxlen=RECENT)
        self._moments = np.zeros((2 * SEGMENTS, COUNT + 1, COUNT + 1))
        """Sums of products of features and outcome by region; the outcome is the last of each axis."""
        self._seen = [0] * (2 * SEGMENTS)
        """Number of steps of each region that the moments have held."""
        self._outcomes: list[_Outcome] = []
        """Outcomes that are not in the moments yet."""
        self._weights = np.zeros(COUNT)
        self._weights[CONSTANT] = PRIOR_MS
        self._fit()
        for step in measured:
            shape = StepShape(step.decodes, step.kv_tokens, step.prompt_tokens, step.prompt_pairs)
            ms = max(step.forward_ms, MIN_MS)
            self._outcomes.append(_Outcome(shape, ms, ms / self.estimate(shape) - 1, 1.0))
            self._fit()

    def estimate(self, shape: StepShape) -> float:
        """Return the expected ``forward_ms`` of a step: the milliseconds that the worker's forward pass takes."""
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
        """Return how many prompt tokens, at most ``most``, the step ``shape`` can have besides within ``limit_ms``.

        They are one piece of a prompt, from its position ``start`` on. ``limit_ms`` limits the estimate of
        ``forward_ms``. Return 0 if not even one token fits.
        """
        if most <= 0 or self.estimate(shape.with_piece(start, 1)) > limit_ms:
            return 0
        if self.estimate(shape.with_piece(start, most)) <= limit_ms:
            return most
        # This runs several times per step. So the loop has ``estimate`` in line, with the same rounding.
        at_knots, slopes, per_pair = self._at_knots, self._slopes, self._per_pair
        per_decodes, per_kv = self._per_decode * shape.decodes, self._per_kv_token * shape.kv_tokens
        tokens, pairs = shape.tokens, shape.prompt_pairs
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            total = tokens + middle
            i = bisect_right(KNOTS, total) - 1
            ms = at_knots[i] + slopes[i] * (total - KNOTS[i]) + per_decodes + per_kv
            if ms + per_pair * (pairs + middle * (start + middle / 2)) <= limit_ms:
                low = middle
            else:
                high = middle
        return low

    def learn(self, shape: StepShape, forward_ms: float, estimated_ms: float) -> None:
        """Learn the cost of steps from one of this ``shape`` that took ``forward_ms``.

        ``estimated_ms``: its estimate when it was planned, by which the model is judged.
        """
        self.steps += 1
        self._recent_errors.append(forward_ms / estimated_ms - 1)
        ms, typical = max(forward_ms, MIN_MS), self._typical_error
        error = ms / self.estimate(shape) - 1
        self._outcomes.append(_Outcome(shape, ms, error, min(1.0, HUBER * typical / max(abs(error), MIN_ERROR))))
        typical = typical * ERROR_GAIN if abs(error) > typical else typical / ERROR_GAIN
        self._typical_error = min(max(typical, MIN_ERROR), MAX_ERROR)
        if self.steps < EAGER_STEPS or len(self._outcomes) >= MAX_OUTCOMES:
            self._fit()

    def catch_up(self) -> None:
        """Refit the model if that is due. It takes half a millisecond, so call it when no message waits."""
        if len(self._outcomes) >= REFIT_STEPS:
            self._fit()

    def learn_overhead(self, ms: float) -> None:
        """Learn the overhead of a step: the ``ms`` between two results beyond the second step's ``forward_ms``."""
        allowed = max(self.overhead_ms, 0.1)
        self.overhead_ms += min(max(ms - self.overhead_ms, -allowed), allowed) / OVERHEAD_STEPS

    @property
    def median_error(self) -> float | None:
        """Median of the last steps' absolute errors, relative to their estimates; None before the first."""
        errors = sorted(map(abs, self._recent_errors))
        return errors[len(errors) // 2] if errors else None

    def info(self) -> dict[str, Any]:
        """Return the parameters and the latest errors of estimates, JSON-ready."""
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
        self._take_outcomes()
        total = self._moments.sum(axis=0)
        a, b = total[:COUNT, :COUNT], total[:COUNT, COUNT]
        self._assume(a, b)
        w = self._weights = solve_non_negative(a, b, self._weights)
        # Adding a floor keeps the order of any two estimates; taking the larger of the two would not.
        self._at_knots: list[float] = (_AT_KNOTS @ w + MIN_MS).tolist()
        self._slopes: list[float] = (w[FIRST_SEGMENT:DECODES] / _LENGTHS).tolist()
        self._per_decode = float(w[DECODES]) / DECODE_UNIT
        self._per_kv_token = float(w[KV]) / KV_UNIT
        self._per_pair = float(w[PAIRS]) / PAIR_UNIT

    def _take_outcomes(self) -> None:
        if not self._outcomes:
            return
        self._follow_the_machine()
        z = np.empty((len(self._outcomes), COUNT + 1))
        z[:, :COUNT] = _features([o.shape for o in self._outcomes])
        z[:, COUNT] = [o.ms for o in self._outcomes]
        z /= np.array([[o.scale] for o in self._outcomes])
        regions: dict[int, list[int]] = {}
        for i, outcome in enumerate(self._outcomes):
            regions.setdefault(outcome.region, []).append(i)
        weights = np.array([o.weight for o in self._outcomes])
        forget = 1 - max(1 / MEMORY_STEPS, IMPATIENCE * self._typical_error)
        for region, members in regions.items():
            count = len(members)
            rows, faded = z[members], weights[members] * forget ** np.arange(count - 1, -1, -1)
            self._seen[region] += count
            self._moments[region] *= forget**count
            self._moments[region] += rows.T @ (rows * faded[:, None])
        self._outcomes = []

    def _follow_the_machine(self) -> None:
        """Scale all regions by the median error of the last steps in well-known regions, if it exceeds ``CHANGE``.

        Then the whole machine has become slower or faster.
        """
        errors = sorted(o.error for o in self._outcomes if self._seen[o.region] >= KNOWN)
        middle = errors[len(errors) // 2] if len(errors) >= REFIT_STEPS // 2 else 0.0
        if abs(middle) > CHANGE:
            self._moments[:, COUNT] *= 1 + middle
            self._moments[:, :, COUNT] *= 1 + middle

    def _assume(self, a: F64, b: F64) -> None:
        """Add weak assumptions to the normal equations of the fit, in place; observed steps outweigh them.

        ``a`` [COUNT, COUNT]: the matrix. ``b`` [COUNT]: the right-hand side.
        """
        costs = np.maximum(_ASSUMED_AT @ self._weights, MIN_MS)
        a += (costs**-2.0 @ _ASSUMED).reshape(COUNT, COUNT)
        if self._kv_prior:
            a[KV, KV] += PRIOR_WEIGHT / self._kv_prior**2
            b[KV] += PRIOR_WEIGHT / self._kv_prior
        # None of the above is about milliseconds. This is, with so little weight that one observed step overrides it.
        a[CONSTANT, CONSTANT] += PRIOR_WEIGHT**2 / PRIOR_MS**2
        b[CONSTANT] += PRIOR_WEIGHT**2 / PRIOR_MS


def make_cost_model(worker: WorkerReady) -> CostModel:
    """Return a cost model with what the worker measured before the first request."""
    kv_ms = 0.0
    if worker.measured and worker.step_weight_bytes:
        # A small step reads the weights once. KV comes from the same memory, hardly faster.
        bytes_per_ms = worker.step_weight_bytes / max(min(m.forward_ms for m in worker.measured), MIN_MS)
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
