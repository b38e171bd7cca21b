"""Least squares with weights that can't be negative."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

MAX_ROUNDS = 12
"""Maximum rounds. Warm-started, two are usual. A solution that is not final is usable: it is clipped at zero."""

RIDGE = 1e-10
"""Share added to the diagonal.

It is far too small to change a result, and enough for a matrix made singular by rounding.
"""


def solve_non_negative(a: F64, b: F64, start: F64) -> F64:
    """Return the ``w`` ≥ 0 that minimises ``w·a·w / 2 - b·w``.

    ``a`` [N, N] is symmetric and positive definite, ``b`` is [N]. The method is an active-set one (Lawson and Hanson's,
    with all offenders leaving at once). Weights are either free or held at zero. Those that turn negative are held, and
    one that the gradient pulls up is released. ``start``: a guess, of which only the signs matter; the previous
    solution is a good one.
    """
    # With ones on the diagonal, weights of very different sizes do not make the matrix badly conditioned.
    unit = 1 / np.sqrt(a.diagonal())
    a = a * unit * unit[:, None]
    a[np.diag_indices_from(a)] += RIDGE
    b = b * unit
    free = start > 0
    if not free.any():
        free[:] = True
    w = np.zeros_like(b)
    tolerance = 1e-9 * float(np.abs(b).max(initial=0.0))
    for _ in range(MAX_ROUNDS):
        w[:] = 0.0
        index = np.flatnonzero(free)
        w[index] = np.linalg.solve(a[np.ix_(index, index)], b[index])
        negative = w < 0
        if negative.any():
            free &= ~negative
            continue
        pull = b - a @ w
        pull[free] = 0.0
        strongest = int(pull.argmax())
        if pull[strongest] <= tolerance:
            break
        free[strongest] = True
    return np.maximum(w, 0.0) * unit
