"""Corrects estimates by a line through their latest outcomes."""

from __future__ import annotations

HALF_LIFE = 30.0
"""Seconds in which half of what was learned is forgotten, so an option that is not chosen gets another chance."""
LEAST = 5.0
"""Scale of errors: below it an error counts as it is, above it by its share of the estimate."""
PRIOR = 4.0
"""Weight of the prior: this many outcomes that equal their estimates."""
SURPRISE = 4.0


class Line:
    """``y = a + b x``, both 0 or more, by least squares of relative errors (weights ``1 / (x + LEAST)²``).

    A ridge holds the line at ``y = slope · x`` until it has learned, and draws it back there without new outcomes. One
    odd outcome has little effect: none counts for more than ``SURPRISE`` times its estimate. ``steepest``: maximum of
    ``b``.
    """

    def __init__(self, slope: float, steepest: float = 4.0) -> None:
        self._slope = slope
        self._steepest = steepest
        self._sums = [0.0] * 5
        """Sums of w, w x, w x², w y and w x y."""
        self._at = 0.0

    def at(self, x: float, now: float) -> float:
        """Return the outcome ``y`` that the line predicts for ``x`` at ``now``, a time in seconds."""
        a, b = self.fit(now)
        return a + b * x

    def fit(self, now: float = 0.0) -> tuple[float, float]:
        """Return ``a`` and ``b`` of the line ``y = a + b x`` at ``now``; without ``now``, as of its last use."""
        self._forget(now)
        w, wx, wxx, wy, wxy = self._sums
        w += PRIOR / LEAST**2
        wxx += PRIOR
        wxy += PRIOR * self._slope
        det = w * wxx - wx * wx
        a, b = (wxx * wy - wx * wxy) / det, (w * wxy - wx * wy) / det
        if a < 0:
            a, b = 0.0, wxy / wxx
        if not 0 <= b <= self._steepest:
            b = min(max(b, 0.0), self._steepest)
            a = max(0.0, (wy - b * wx) / w)
        return a, b

    def learn(self, x: float, y: float, now: float) -> None:
        """Learn that ``x`` had the outcome ``y`` at ``now``. An outcome far above its estimate counts for less."""
        y = min(y, SURPRISE * (self.at(x, now) + LEAST))
        w = 1 / (x + LEAST) ** 2
        for i, term in enumerate((w, w * x, w * x * x, w * y, w * x * y)):
            self._sums[i] += term

    def _forget(self, now: float) -> None:
        kept = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE)
        self._sums = [s * kept for s in self._sums]
        self._at = max(self._at, now)
