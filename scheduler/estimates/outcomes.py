"""How forecasts came out: a line through the latest, by which the next are corrected."""

from __future__ import annotations

HALF_LIFE = 30.0
"""Seconds in which half of what was learned is forgotten: a place that is not taken gets another chance."""
LEAST = 5.0
"""Below it an error counts as it is, above it by its share of what was foreseen."""
PRIOR = 4.0
"""As many outcomes as foreseen are taken for granted."""
SURPRISE = 4.0


class Line:
    """``y = a + b x``, both 0 or more, by least squares of relative errors (weights ``1 / (x + LEAST)²``), with a ridge
    that holds it at ``y = slope · x`` until it has learned, and draws it back there when there is no news.

    One outcome that means nothing does little: none counts for more than ``SURPRISE`` times what was foreseen.
    ``steepest``: the most that ``b`` can be.
    """

    def __init__(self, slope: float, steepest: float = 4.0) -> None:
        self._slope = slope
        self._steepest = steepest
        self._sums = [0.0] * 5
        """Of w, w x, w x², w y and w x y."""
        self._at = 0.0

    def at(self, x: float, now: float) -> float:
        """What to expect of ``x``."""
        a, b = self.fit(now)
        return a + b * x

    def fit(self, now: float = 0.0) -> tuple[float, float]:
        """``a`` and ``b``; without ``now`` as they were when the line was last used."""
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
        """``x`` came out as ``y``."""
        y = min(y, SURPRISE * (self.at(x, now) + LEAST))
        w = 1 / (x + LEAST) ** 2
        for i, term in enumerate((w, w * x, w * x * x, w * y, w * x * y)):
            self._sums[i] += term

    def _forget(self, now: float) -> None:
        kept = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE)
        self._sums = [s * kept for s in self._sums]
        self._at = max(self._at, now)
