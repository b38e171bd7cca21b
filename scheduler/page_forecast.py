"""How many more slots running requests will need at most: their page use simulated over the steps to come.

Each that decodes takes a page whenever its last one is full, and gives all of its own back when it ends, which nobody
knows, but of which there is an estimate (``output_lengths.py``). So at each moment ahead the use has a mean and a
spread; what must be kept is the highest of mean plus ``spread`` standard deviations over all moments. Many requests
that end at different times need little more than they have; a few that began together need nearly all at once.

Pure functions of numbers. (Simulating page use at admission is how Tokasaurus does it, with one predicted end a
request.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def moments(longest: int) -> F64:
    """[T]: the steps ahead at which use is looked at: 1, 2, 3 …, half as many more each, up to ``longest``."""
    steps = [1]
    while steps[-1] < longest:
        steps.append(min(max(steps[-1] + 1, steps[-1] * 3 // 2), longest))
    return np.array(steps, dtype=np.float64)


class Held(NamedTuple):
    """What one request has. ``length``: slots that hold its tokens. ``own``: those (in whole pages) that are free for
    others when it ends, which are not what it shares with them. ``most``: tokens that it may still generate.
    """

    length: int
    own: int
    most: int


def extra_slots(held: Sequence[Held], alive: F64, ahead: F64, page_size: int, spread: float) -> float:
    """The most slots, beyond those in use now, that all of ``held`` [N] will have at one of the moments ``ahead`` [T].

    ``alive`` [N, T]: how likely each still runs then. At least 0: what ends first may be needed before.
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
