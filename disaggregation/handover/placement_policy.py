"""Placement of prompts: a decode has a prompt computed by its prefill ("there") or computes it itself ("here").

``--disaggregation-threshold`` decides:

- ``always`` and ``never``: always or never on the prefill.
- A number: on the prefill from this many tokens on that are not cached here.
- ``auto`` (default): on the instance with the earlier first token.

For ``auto`` the prefill is asked for a forecast when the decode has memory for the prompt. Each instance estimates its
own time to the first token (``scheduler/estimates/``) from its queue and its cache. The time that the KV takes after
the first token is added to the prefill's forecast, because the second token waits for the KV. All estimates are
corrected by recent outcomes, those of each prefill separately.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ...runtime.metrics import Metrics, counter
from ...scheduler.estimates.outcomes import Line
from ...scheduler.estimator import Estimator
from ...scheduler.req import FirstTokenEstimate, Req

FIXED = {"auto": 0.0, "always": 0.0, "never": math.inf}
"""Thresholds in tokens of the named settings."""
RECENT = 256
"""Number of latest prompts of which the median error is reported."""
MOST_PEERS = 256
"""Maximum number of prefills with learned corrections. The least recently used one is forgotten first."""
MOST_MS_A_PAGE = 1000.0
"""Upper limit of the learned delay of the KV, in milliseconds per page."""


class Prospects(NamedTuple):
    """Expected milliseconds until a prompt's first token and its KV, on both instances."""

    here: Callable[[int], float]
    """Time to the first token on this instance, by the number of tokens to compute."""
    there: float
    """Time to the first token on the prefill."""
    lag: Callable[[int], float]
    """Time from the prefill's first token to the arrival of the KV, by the number of pages."""

    def sooner(self, tokens: int, pages: int) -> float:
        """Return the milliseconds to the first token and its KV, on the instance that is sooner.

        ``tokens``: tokens to compute if this instance computes the prompt. ``pages``: pages to send if the prefill
        does.
        """
        return min(self.here(tokens), self.there + self.lag(pages))


class _Prefill:
    """Corrections learned for one prefill: of its forecasts of first tokens, and the KV's delay by pages (ms)."""

    def __init__(self) -> None:
        self.first_token = Line(1.0)
        self.lag = Line(0.0, steepest=MOST_MS_A_PAGE)


class _Outcomes:
    """Statistics of prompts computed in one of the two places."""

    def __init__(self) -> None:
        self.prompts = 0
        self.predicted_seconds = 0.0
        """Estimated time from the decision to the first token, of prompts with a first token."""
        self.actual_seconds = 0.0
        """Actual time from the decision to the first token, of prompts with a first token."""
        self._errors: deque[float] = deque(maxlen=RECENT)

    def learn(self, estimated_ms: float, ms: float) -> None:
        self.predicted_seconds += estimated_ms / 1000
        self.actual_seconds += ms / 1000
        self._errors.append(abs(ms - estimated_ms) / max(estimated_ms, ms, 1e-3))

    def info(self) -> dict[str, Any]:
        errors = sorted(self._errors)
        return {
            "prompts": self.prompts,
            "median_error": round(errors[len(errors) // 2], 4) if errors else None,
        }


class PlacementPolicy:
    """Decision which instance computes a prompt. ``asks``: whether it needs the prefill's forecast."""

    def __init__(self, threshold: str, estimator: Estimator) -> None:
        self.asks = threshold == "auto"
        self._least = FIXED[threshold] if threshold in FIXED else int(threshold)
        self._estimator = estimator
        self.here, self.there = _Outcomes(), _Outcomes()
        self._own = Line(1.0)
        self._prefills: dict[str, _Prefill] = {}

    def is_short(self, req: Req) -> bool:
        """Return whether so little of the prompt is uncached that it is computed here, without asking the prefill.

        Always True with the threshold ``never``, and False with ``always`` and ``auto``. The decision is counted,
        except with ``auto``: there ``is_here`` decides later.
        """
        here = self._least > 0 and self._estimator.uncached(req) < self._least
        if here or not self.asks:
            (self.here if here else self.there).prompts += 1
        return here

    def would_decline(self, req: Req) -> bool:
        """Return whether a decode with the same threshold would compute the prompt itself (``is_short``).

        This is called on a prefill, which does not know what the decode has cached, so the whole prompt counts.
        """
        return req.prompt_len < self._least

    def is_here(self, req: Req, prefill: str, there_ms: float, computed: int, pages: int, now: float) -> bool:
        """Decide whether to compute the prompt here, count the decision, and record the estimate in the request.

        ``prefill``: epoch of the prefill, which forecasts ``there_ms`` milliseconds to the first token and would send
        ``pages`` pages. ``computed`` tokens of the prompt are cached here.
        """
        here_ms = self._estimator.first_token_ms(req, req.prompt_len - computed, now)
        here, there = self._own.at(here_ms, now), self._learned(prefill).first_token.at(there_ms, now)
        is_here = here < there + self._learned(prefill).lag.at(pages, now)
        (self.here if is_here else self.there).prompts += 1
        ms, raw_ms = (here, here_ms) if is_here else (there, there_ms)
        req.first_token_estimate = FirstTokenEstimate(None if is_here else prefill, ms, raw_ms, now)
        return is_here

    def prospects(self, req: Req, prefill: str, there_ms: float | None, now: float) -> Prospects:
        """Return the estimates that ``is_here`` compares, for any number of tokens and pages. Decide nothing.

        ``there_ms``: the prefill's forecast in milliseconds. None means that the prefill computes the prompt in any
        case. Its time then counts as 0 and the time here as infinite.
        """
        learned = self._learned(prefill)
        lag = partial(learned.lag.at, now=now)
        if there_ms is None:
            return Prospects(lambda tokens: math.inf, 0.0, lag)
        here = lambda tokens: self._own.at(self._estimator.first_token_ms(req, tokens, now), now)  # noqa: E731
        return Prospects(here, learned.first_token.at(there_ms, now), lag)

    def on_first_token(self, req: Req, now: float) -> None:
        """Learn from the actual time to a request's first token, if it was placed by an estimate."""
        estimate, req.first_token_estimate = req.first_token_estimate, None
        if estimate is None:
            return
        ms = (now - estimate.at) * 1000
        here = estimate.prefill is None
        (self.here if here else self.there).learn(estimate.ms, ms)
        self._line_of(estimate).learn(estimate.raw_ms, ms, now)

    def on_cancelled(self, req: Req, now: float) -> None:
        """Learn from a request that ended without a first token, if its estimate was exceeded.

        Otherwise an instance that hangs would count as fast for as long as it hangs.
        """
        estimate, req.first_token_estimate = req.first_token_estimate, None
        if estimate is not None and (ms := (now - estimate.at) * 1000) > estimate.ms:
            self._line_of(estimate).learn(estimate.raw_ms, ms, now)

    def learn_lag(self, prefill: str, pages: int, seconds: float, now: float) -> None:
        """Learn that the KV of ``pages`` pages arrived ``seconds`` after the first token of its prompt."""
        self._learned(prefill).lag.learn(pages, seconds * 1000, now)

    def info(self) -> dict[str, Any]:
        """Return decisions since the start, recent errors of estimates, and the corrections in use, ready for JSON."""

        def line(of: Line) -> list[float]:
            return [round(term, 4) for term in of.fit()]

        prefills = {
            epoch: {"first_token": line(p.first_token), "kv_by_pages": line(p.lag)}
            for epoch, p in self._prefills.items()
        }
        corrections = {"here": line(self._own), "there": prefills}
        return {"here": self.here.info(), "there": self.there.info(), "corrections": corrections}

    def _line_of(self, estimate: FirstTokenEstimate) -> Line:
        return self._own if estimate.prefill is None else self._learned(estimate.prefill).first_token

    def _learned(self, prefill: str) -> _Prefill:
        learned = self._prefills.pop(prefill, None) or _Prefill()
        self._prefills[prefill] = learned  # the latest is the last
        if len(self._prefills) > MOST_PEERS:
            del self._prefills[next(iter(self._prefills))]
        return learned


METRICS: Metrics[PlacementPolicy] = (
    counter(
        "pdserve_prompt_places_total",
        "Prompts by where they were to be computed: by this decode itself (here), or by its prefill (there).",
        lambda c: {"here": c.here.prompts, "there": c.there.prompts},
        "place",
        note="`--disaggregation-threshold` decides.",
    ),
    counter(
        "pdserve_first_token_foreseen_seconds_total",
        "Estimated time to first tokens, from the decision where to compute their prompts.",
        lambda c: {"here": c.here.predicted_seconds, "there": c.there.predicted_seconds},
        "place",
        note="With `--disaggregation-threshold auto`.",
    ),
    counter(
        "pdserve_first_token_came_seconds_total",
        "Actual time to first tokens, of prompts with an estimate.",
        lambda c: {"here": c.here.actual_seconds, "there": c.there.actual_seconds},
        "place",
        note="Divided by `pdserve_first_token_foreseen_seconds_total`: how far estimates are off.",
    ),
)
