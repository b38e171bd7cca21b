"""Here or there: whether a decode has a prompt computed by its prefill, or computes it itself.

``--disaggregation-threshold`` says which: ``always`` there, ``never``, from a number of tokens on that are not cached
here, or, by default, where the first token comes sooner. For that the prefill is asked when both legs of a request have
met: it foresees its own part (``scheduler/forecast.py``), with its queue and what it has cached, as this instance does
its own. To a prefill's forecast belongs the time that the KV needs behind the first token, as the second one waits for
it. Both are corrected by how such forecasts came out lately.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from ...messages.metrics import ChoiceCounts, PlaceCounts
from ...scheduler.forecast import PromptForecast
from ...scheduler.req import Foreseen, Req

FIXED = {"auto": 0.0, "always": 0.0, "never": math.inf}
GAIN = 1 / 8
"""Of the newest outcome in what is learned."""
MOST_OFF = 4.0
"""A forecast is corrected by this factor at most, either way."""
RECENT = 256
MIN_MS = 0.1


class _Place:
    """One of the two: its books, and by what factor its forecasts were wrong lately."""

    def __init__(self) -> None:
        self.counts = PlaceCounts()
        self._factor = 1.0
        self._errors: deque[float] = deque(maxlen=RECENT)

    def corrected(self, ms: float) -> float:
        return ms * self._factor

    def learn(self, foreseen: Foreseen, ms: float) -> None:
        self.counts.predicted_seconds += foreseen.ms / 1000
        self.counts.actual_seconds += ms / 1000
        self._errors.append(abs(ms / max(foreseen.ms, MIN_MS) - 1))
        outcome = min(max(max(ms, MIN_MS) / max(foreseen.raw_ms, MIN_MS), 1 / MOST_OFF), MOST_OFF)
        # Of factors the middle is the geometric one: half and twice are equally wrong.
        self._factor *= (outcome / self._factor) ** GAIN

    def info(self) -> dict[str, Any]:
        errors = sorted(self._errors)
        return {
            "prompts": self.counts.prompts,
            "correction": round(self._factor, 3),
            "median_error": round(errors[len(errors) // 2], 4) if errors else None,
        }


class Choice:
    """Decides, and keeps the books. ``asks``: whether a prefill's forecast is needed."""

    def __init__(self, threshold: str, forecast: PromptForecast) -> None:
        self.asks = threshold == "auto"
        self._least = FIXED[threshold] if threshold in FIXED else int(threshold)
        self._forecast = forecast
        self._here, self._there = _Place(), _Place()
        self._lag_ms = 0.0
        """Of a page's KV, behind the first token."""

    def is_short(self, req: Req) -> bool:
        """Whether so little of its prompt is to be computed that no other instance is asked."""
        here = self._least > 0 and self._forecast.uncached(req) < self._least
        if here or not self.asks:
            (self._here if here else self._there).counts.prompts += 1
        return here

    def is_here(self, req: Req, there_ms: float, pages: int, now: float) -> bool:
        """Whether to compute it here, where the prefill foresees ``there_ms`` and would send so many pages."""
        here_ms = self._forecast.ms(req)
        here, there = self._here.corrected(here_ms), self._there.corrected(there_ms)
        is_here = here < there + pages * self._lag_ms
        place = self._here if is_here else self._there
        place.counts.prompts += 1
        req.foreseen = Foreseen(is_here, here if is_here else there, here_ms if is_here else there_ms, now)
        return is_here

    def learn(self, req: Req, now: float) -> None:
        """The first token of a request is known."""
        foreseen, req.foreseen = req.foreseen, None
        if foreseen is not None:
            (self._here if foreseen.here else self._there).learn(foreseen, (now - foreseen.at) * 1000)

    def learn_lag(self, pages: int, seconds: float) -> None:
        """So long behind its first token the KV of a prompt was there."""
        if pages:
            self._lag_ms += (seconds * 1000 / pages - self._lag_ms) * GAIN

    def counts(self) -> ChoiceCounts:
        """Decisions since the start."""
        return ChoiceCounts(self._here.counts, self._there.counts)

    def info(self) -> dict[str, Any]:
        """JSON-ready: decisions since the start, and how far forecasts were off lately."""
        return {"here": self._here.info(), "there": self._there.info(), "kv_ms_per_page": round(self._lag_ms, 4)}
