"""Time limits of hand-overs."""

from __future__ import annotations

from typing import NamedTuple

from ...scheduler.options import SchedulerOptions


class HandoverLimits(NamedTuple):
    """Time limits of a hand-over, in seconds."""

    bootstrap: float
    """Waiting for the second of the two requests: the client's and the decode's."""
    queue: float
    """Waiting for memory, and for the prompt to be computed."""
    transfer: float
    """Without progress, once the computation of the prompt has begun."""

    @property
    def piece(self) -> float:
        """Time limit in seconds from one chunk of a prompt to the next. Other requests may overtake it before each
        chunk.
        """
        return max(self.queue, self.transfer)

    @property
    def landing(self) -> float:
        """Time limit in seconds of a receiver for progress. The sender's limits are shorter, so it can give the reason
        first.
        """
        return self.queue + self.transfer

    @property
    def asking(self) -> float:
        """Time limit in seconds of a sender that has both requests and waits for the receiver to ask for the KV.

        A receiver waits for memory, then for a forecast or its store, and gives up before this limit. The limit is for
        a receiver that has lost the room.
        """
        return self.bootstrap + self.queue + self.landing

    @staticmethod
    def of(options: SchedulerOptions) -> HandoverLimits:
        """Return the limits set by the options."""
        return HandoverLimits(
            options.disaggregation_bootstrap_timeout,
            options.disaggregation_queue_timeout,
            options.disaggregation_transfer_timeout,
        )
