"""Computes the tables of rotations that the CPU engine reads. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...model_files.rope_frequencies import attention_factor, inverse_frequencies
from ...model_files.spec import RopeSpec
from .library import load_library
from .team import Team


class Rotations(NamedTuple):
    """Cosines and sines of positions, float32 [positions, rotated_dim / 2]."""

    cosines: npt.NDArray[np.float32]
    sines: npt.NDArray[np.float32]


def rotations(rope: RopeSpec, rotated_dim: int, positions: int, team: Team) -> Rotations:
    """Return the cosines and sines of the positions below ``positions``, times the rope's attention factor.

    Pairs of the ``rotated_dim`` elements beyond those that the rope turns have the angle 0. Angles are float32, and
    their cosines and sines the nearest float32. Computed on the threads of ``team``.
    """
    turned, half = rope.rotary_dim // 2, rotated_dim // 2
    frequencies, scales = np.zeros(half, np.float32), np.ones(half, np.float32)
    frequencies[:turned], scales[:turned] = inverse_frequencies(rope), attention_factor(rope)
    found = Rotations(*(np.empty((positions, half), np.float32) for _ in range(2)))
    addresses = [values.ctypes.data for values in (frequencies, scales, *found)]
    load_library().pds_rotations(team.handle, *addresses[:2], half, positions, *addresses[2:])
    return found
