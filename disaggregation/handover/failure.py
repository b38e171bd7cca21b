"""Why a hand-over ended without success."""

from __future__ import annotations

from typing import NamedTuple

CLIENT_GONE = 499
"""HTTP status of a request that its client left or aborted."""


class Failure(NamedTuple):
    """Why a hand-over failed."""

    status: int
    """HTTP status of the request; ``CLIENT_GONE`` if it was aborted."""
    reason: str
