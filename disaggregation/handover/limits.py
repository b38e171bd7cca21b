"""How long a hand-over may wait for something to happen."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.options import ServerOptions


class HandoverLimits(NamedTuple):
    """Seconds. ``bootstrap``: until both legs know of each other. ``queue``: for memory, and for a turn to compute.
    ``transfer``: without progress, once the prompt has begun to be computed.
    """

    bootstrap: float
    queue: float
    transfer: float

    @property
    def piece(self) -> float:
        """Seconds from one piece of a prompt to the next: others may pass it, as they may before its first piece."""
        return max(self.queue, self.transfer)

    @property
    def landing(self) -> float:
        """Seconds that a receiver waits for news of a hand-over. More than the sender's own limits: it says why."""
        return self.queue + self.transfer

    @staticmethod
    def of(options: ServerOptions) -> HandoverLimits:
        """As the options say."""
        return HandoverLimits(
            options.disaggregation_bootstrap_timeout,
            options.disaggregation_queue_timeout,
            options.disaggregation_transfer_timeout,
        )
