"""Ends requests that have run out of time: their deadline has passed, or they lacked memory for too long."""

from __future__ import annotations

from ..messages.error_codes import OVERLOADED
from ..messages.outputs import FinishReason, FinishType
from .req import ReqState, Route
from .runs_requests import RunsRequests


class Expiry:
    """Ends late requests of the scheduler, and cancels their hand-overs."""

    def __init__(self, scheduler: RunsRequests) -> None:
        self._scheduler = scheduler

    def end_late(self, now: float) -> None:
        """End requests that have exceeded their ``timeout_s``."""
        scheduler = self._scheduler
        for req in scheduler.deadlines.pop(now):
            text = f"the request did not finish within its timeout_s of {req.msg.timeout_s:g} s"
            if req.output_len and req.route is not Route.OUTGOING:
                scheduler.end(req, ReqState.ABORTED, FinishReason(FinishType.TIMEOUT, message=text))
            else:
                scheduler.fail(req, 408, f"{text}, and had no output yet", "timeout_error")
            scheduler.handovers.cancel(req, text)

    def end_stuck(self, now: float) -> None:
        """Fail a request that has lacked memory for longer than the queue timeout because hand-overs hold it.

        Hand-overs end by themselves and return their memory, except those with a writer that does not stop.
        """
        scheduler = self._scheduler
        stuck, limit = scheduler.planner.shortage.stuck, scheduler.options.disaggregation_queue_timeout
        if stuck is not None and now - stuck.since > limit:
            text = f"hand-overs of other requests held the memory that this one needs for {limit:.0f} s"
            scheduler.fail(stuck.req, 503, text, code=OVERLOADED)
            scheduler.handovers.cancel(stuck.req, text)
