"""Learns how long outputs become, so that admission can estimate their memory.

Clients ask for a maximum (``max_new_tokens``) and mostly use a part of it; how much depends on the client. So requests
are divided into classes by their maximum, in powers of two. Each class has a *survival curve*: the share of its outputs
that is longer than a number of tokens. It is estimated as life tables are (Kaplan and Meier): of the requests that
reached a length, how many ended there. Running requests count among those that reached their present length. With the
finished ones alone, long outputs would seem rare for as long as the first ones run.

Before anything is known, every length up to the maximum (or ``CLIP`` tokens) is equally likely, with the weight of
``PRIOR`` requests. That fades, as all that is known does, over ``MEMORY`` requests of its class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

EDGES: F64 = np.unique(np.round(2 ** (np.arange(0, 69) / 4))).astype(np.float64)
"""Lengths at which curves are kept: 1, 2, 3 … each a quarter more than the one before, up to 131,072."""
CLIP = 4096
PRIOR = 4.0
MEMORY = 256
LEAST = 1e-9
FROM_ZERO: F64 = np.concatenate([[0.0], EDGES])


class OutputLengths:
    """Survival curves by class. ``died`` [E]: outputs that are longer than the edge before, and not than this one."""

    def __init__(self) -> None:
        self._died: dict[int, F64] = {}

    def learn(self, max_new_tokens: int, length: int) -> None:
        """Learn from a request with this maximum that ended by itself after ``length`` tokens (at least 1)."""
        name = max_new_tokens.bit_length()
        died = self._died.setdefault(name, self._prior(name))
        died *= 1 - 1 / MEMORY
        died[min(int(np.searchsorted(EDGES, length)), len(EDGES) - 1)] += 1

    def survival(self, most: Sequence[int], have: Sequence[int], ahead: F64) -> F64:
        """Return [N, T]: the probability that each of N running requests generates more than ``ahead`` [T] further
        tokens.

        ``most`` [N]: their ``max_new_tokens``. ``have`` [N]: tokens that they have generated so far.
        """
        tops, done = np.array(most, dtype=np.int64), np.array(have, dtype=np.float64)
        classes = np.array([m.bit_length() for m in most], dtype=np.int64)
        then = done[:, None] + ahead
        alive: F64 = np.empty(then.shape)
        for name in np.unique(classes).tolist():
            members = classes == name
            curve = self._log_curve(name, done[members])
            now = np.interp(done[members], FROM_ZERO, curve)
            alive[members] = np.exp(np.interp(then[members], FROM_ZERO, curve) - now[:, None])
        alive[then >= tops[:, None]] = 0.0
        return alive

    def mean(self, max_new_tokens: int) -> float:
        """Return the expected output length, in tokens, of a request with this maximum."""
        alive = np.exp(self._log_curve(max_new_tokens.bit_length(), np.empty(0)))
        edges = np.minimum(FROM_ZERO, max_new_tokens)
        return float(((alive[1:] + alive[:-1]) / 2 * np.diff(edges)).sum())

    def _log_curve(self, name: int, running: F64) -> F64:
        """Return [E + 1]: for output length 0 and for each edge, the log of the share of outputs that are longer.

        ``name``: number of the class. ``running``: present lengths of its requests that still run.
        """
        died = self._died[name] if name in self._died else self._prior(name)
        came = died[::-1].cumsum()[::-1]
        # A running request reached the edge that it is at, and did not end before.
        passed = np.searchsorted(EDGES, running, side="right")
        came += np.bincount(passed, minlength=len(EDGES) + 1)[::-1].cumsum()[::-1][1:]
        stays = 1 - died / np.maximum(came, LEAST)
        return np.concatenate([[0.0], np.log(np.maximum(stays, LEAST)).cumsum()])

    @staticmethod
    def _prior(name: int) -> F64:
        top = float(min((1 << name) - 1, CLIP))
        spread: F64 = PRIOR * np.diff(np.minimum(FROM_ZERO, top)) / max(top, 1.0)
        return spread
