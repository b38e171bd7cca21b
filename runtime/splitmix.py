"""splitmix64 (Steele, Lea, Flood 2014): a counter that grows by ``GOLDEN``, and a mixer from counts to random bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a random-looking number for each of ``bits``, by the last step of splitmix64.

    Different inputs stay different. The array ``bits`` is not changed.
    """
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))
