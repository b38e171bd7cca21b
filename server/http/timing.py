"""Where a request's time went, as clients are told."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...messages.outputs import Timing
from .submission import Choice


def timing(spent: Timing) -> dict[str, float]:
    """Milliseconds, and bytes for the hand-over."""
    return {name: round(value, 3) for name, value in msgspec.structs.asdict(spent).items()}


def timing_of(choices: Sequence[Choice]) -> dict[str, dict[str, float]]:
    """``{"timing": …}`` of an answer that is one choice and has ended, else ``{}``."""
    meta = choices[0].meta if len(choices) == 1 else None
    return {} if meta is None else {"timing": timing(meta.timing)}
