"""Estimates how many more slots running requests will need at most, by simulating their page use over the next steps.

Each decoding request takes a page when its last one is full, and returns its own pages when it ends. When that will be
is not known, but it is estimated (``output_lengths.py``). So at each moment ahead the use has a mean and a spread. The
reserve is the maximum, over all moments, of the mean plus ``spread`` standard deviations. Many requests that end at
different times need little more than they have. A few that began together need nearly all at once.

Pure functions of numbers. (Tokasaurus simulates page use at admission too, with one predicted end a request.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def moments(longest: int) -> F64:
    """Return [T]: the steps ahead at which use is estimated: 1, 2, 3 …, half as many more each, up to ``longest``."""
    steps = [1]
    while steps[-1] < longest:
        steps.append(min(max(steps[-1] + 1, steps[-1] * 3 // 2), longest))
    return np.array(steps, dtype=np.float64)


class Held(NamedTuple):
    """Memory of one request.

    ``length``: slots that hold its tokens. ``own``: those, in whole pages, that are freed when it ends, without what it
    shares. ``most``: tokens that it may still generate.
    """

    length: int
    own: int
    most: int


def extra_slots(held: Sequence[Held], alive: F64, ahead: F64, page_size: int, spread: float) -> float:
    """Estimate how many more slots than now the requests ``held`` [N] will use together at the worst moment ahead.

    ``ahead`` [T]: the moments, in steps from now. ``alive`` [N, T]: probability that each request still runs then.
    ``spread``: standard deviations that are added to the mean. The result is at least 0.
    """
    if not held:
        return 0.0
    length, own, most = np.array(held, dtype=np.float64).T
    grown = np.minimum(ahead, most[:, None]) + length[:, None]
    growth = (np.ceil(grown / page_size) - np.ceil(length / page_size)[:, None]) * page_size
    mean = alive * growth - (1 - alive) * own[:, None]
    variance = alive * (1 - alive) * (growth + own[:, None]) ** 2
    use = mean.sum(axis=0) + spread * np.sqrt(variance.sum(axis=0))
    return max(0.0, float(use.max()))
