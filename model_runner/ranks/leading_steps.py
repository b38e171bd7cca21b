"""Runs steps on this rank, and has the ranks that it leads run them; or runs them as its lead says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...messages.channel import encode
from ...messages.worker import CaptureGraphs, ForwardStep
from ...runtime.layers_done import NOT_COUNTED, PassProgress
from ..steps.executor import Model
from ..steps.step_runner import Launched, StepRunner
from .host_ranks import LeadRank
from .process_end import end_after_watch

if TYPE_CHECKING:
    from .world import World


class LeadingSteps(StepRunner):
    """A ``StepRunner`` that sends every step to the other ranks first.

    They compute it at the same time. They choose the same tokens, so they send no answer.

    Rank 0 sends to the ranks of its host and to the leads of the other hosts, and each lead to the ranks of its host.
    This includes the steps of the start-up, which are timed by rank 0.
    """

    def __init__(self, model: Model, max_reqs: int, lead: LeadRank) -> None:
        super().__init__(model, max_reqs)
        self._lead = lead
        place = lead.place
        self._world = lead.join() if place.rank == 0 and place.nodes > 1 else None

    def launch(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Launched:
        """Send the step to the ranks that this one leads, then launch it here.

        ``pushes`` are left out of what is sent: only this rank pushes pages to peers.
        """
        # Pages are pushed by rank 0, which sees every rank's heads.
        own_step = msgspec.structs.replace(step, pushes=[]) if step.pushes else step
        for follower in self._lead.followers:
            follower.send(own_step)
        if self._world is not None:
            self._send(self._world, own_step)
        return super().launch(step, done)

    def capture_graphs(self) -> None:
        """Tell the followers to capture their graphs, and capture this rank's own; do nothing without graph sizes.

        All must capture together, because a captured pass contains sums over all ranks.
        """
        if self._model.engine.graph_sizes:
            for follower in self._lead.followers:
                follower.send(CaptureGraphs())
        super().capture_graphs()

    def _send(self, world: World, step: ForwardStep) -> None:
        try:
            world.send_frame(encode([step]))
        except RuntimeError as e:
            end_after_watch("a step could not be sent to the other hosts", e)


class FollowingSteps(StepRunner):
    """Steps of another rank: graphs are captured when its lead says so, and at no other time."""

    def capture_graphs(self) -> None:
        """Do nothing: ``capture_with_lead`` captures them, at the same time as the lead."""

    def capture_with_lead(self) -> None:
        """Capture this rank's graphs now, because the lead has sent ``CaptureGraphs``.

        The lead is the rank from which this rank gets its steps. All ranks must capture at the same time.
        This waits for them, because a captured pass contains sums over all ranks.
        """
        super().capture_graphs()
