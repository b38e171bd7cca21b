"""When requests arrive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from .prompts import Seed


def random_arrivals(rate: float, burstiness: float, seed: Seed, start: float = 0.0) -> Iterator[float]:
    """Yield endless arrival times in seconds, ``rate`` per second on average, the first one gap after ``start``.

    Gaps follow a gamma distribution of shape ``burstiness`` (1: exponential, so a Poisson process; coefficient of
    variation 1/sqrt(shape)). An infinite rate puts all at ``start``, an infinite burstiness makes all gaps equal.
    """
    if math.isinf(rate):
        yield from itertools.repeat(start)
    rng = np.random.default_rng(seed)
    now = start
    while True:
        now += 1 / rate if math.isinf(burstiness) else rng.gamma(burstiness, 1 / (rate * burstiness))
        yield now


def burst_arrivals(every: float, burst: int, start: float) -> Iterator[float]:
    """Yield ``burst`` arrivals at once, at ``start`` and then every ``every`` seconds, endlessly."""
    for i in itertools.count():
        yield from itertools.repeat(start + i * every, burst)
