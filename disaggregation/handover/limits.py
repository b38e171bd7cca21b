"""How long a hand-over may take."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.options import ServerOptions


class HandoverLimits(NamedTuple):
    """Seconds. ``bootstrap``: until both legs know of each other. ``queue``: for memory, and for a turn to compute.
    ``transfer``: from the first computed piece of the prompt to the last verified page.
    """

    bootstrap: float
    queue: float
    transfer: float

    @staticmethod
    def of(options: ServerOptions) -> HandoverLimits:
        """As the options say."""
        return HandoverLimits(
            options.disaggregation_bootstrap_timeout,
            options.disaggregation_queue_timeout,
            options.disaggregation_transfer_timeout,
        )
