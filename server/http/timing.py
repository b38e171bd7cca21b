"""Where a request's time went, as clients are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...messages.outputs import Timing
from .submission import Choice


def timing(spent: Timing) -> dict[str, Any]:
    """Milliseconds, and bytes for the hand-over."""
    durations = msgspec.structs.asdict(spent)
    timeline = durations.pop("timeline")
    told: dict[str, Any] = _rounded(durations)
    if timeline is not None:
        told["timeline"] = _rounded(msgspec.structs.asdict(timeline))
    return told


def timing_of(choices: Sequence[Choice]) -> dict[str, dict[str, Any]]:
    """``{"timing": …}`` of an answer that is one choice and has ended, else ``{}``."""
    meta = choices[0].meta if len(choices) == 1 else None
    return {} if meta is None else {"timing": timing(meta.timing)}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
