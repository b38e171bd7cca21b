"""The role of the instance."""

from __future__ import annotations

from ..runtime.disaggregation_options import DisaggregationMode


class CurrentRole:
    """Work that this instance is offered now, and by which steps are sized. It does not limit what it can do."""

    def __init__(self, mode: DisaggregationMode) -> None:
        self.mode = mode
        """Changed by ``features/handovers.py`` alone."""
