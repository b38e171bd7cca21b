"""Steps between their launch and their result.

On a processor that computes steps itself, a step has ended when its launch returns, and its result is sent at once. A
device that computes beside the worker gets one more step before the worker waits for it. So it never runs out of work
while the host packs a result or plans.

The worker waits for the next step or the end of the oldest one, whichever is first (``has_result``). The reason: the
scheduler sends a step only after it has received a result. A worker that waited only for an end would read the next
step's message when the device has nothing left to do.

Pages that a step pushes to a peer may go layer by layer while the step is computed (``runtime/layers_done.py``). All
layers are computed when the step's result is available.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...messages.worker import ForwardStep, SendPages, StepResult
from ...runtime.layers_done import NOT_COUNTED, LayersDone, PassProgress
from ..page_mover import PageMover

if TYPE_CHECKING:
    from .step_runner import Launched


class Steps(Protocol):
    """The part of ``StepRunner`` that the queue calls."""

    def launch(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Launched:
        """Launch a step and return what ``collect`` takes; a device only queues it.

        ``done`` counts the layers that have written their KV.
        """
        ...

    def is_done(self, launched: Launched) -> bool:
        """Return whether ``collect`` of this step would return without waiting."""
        ...

    def collect(self, launched: Launched) -> StepResult:
        """Wait until the step has ended, and return its result."""
        ...


class _Open(NamedTuple):
    """A launched step with a result that has not been collected."""

    launched: Launched
    ends: list[LayersDone]
    """The counter of the step's own layers, if it pushes pages, and counters that only note the step's end."""


class StepQueue:
    """Launched steps in order, oldest first.

    ``ahead``: number of steps that may be open while another is launched. ``mover``: pushes pages.
    """

    def __init__(self, steps: Steps, mover: PageMover, ahead: int) -> None:
        self._steps = steps
        self._mover = mover
        self._ahead = ahead
        self._open: deque[_Open] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def use(self, steps: Steps) -> None:
        """Launch later steps by the runner ``steps`` instead, which also collects the steps that are open now."""
        self._steps = steps

    @property
    def is_full(self) -> bool:
        """Return whether more than ``ahead`` launched steps are not collected yet.

        One must then be collected before the next launch.
        """
        return len(self._open) > self._ahead

    @property
    def has_result(self) -> bool:
        """Return whether the oldest launched step has ended, so that ``collect`` does not wait.

        At least one step must be launched and not collected.
        """
        return self._steps.is_done(self._open[0].launched)

    def launch(self, step: ForwardStep) -> None:
        """Launch the step, and submit its ``pushes`` to the page mover, which sends pages while layers are computed."""
        ends = [self._push(step)] if step.pushes else []
        self._open.append(_Open(self._steps.launch(step, ends[0] if ends else NOT_COUNTED), ends))

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. There must be one that is not collected yet.

        Pages that waited for its end are pushed then.
        """
        launched, ends = self._open.popleft()
        result = self._steps.collect(launched)
        for done in ends:
            done.finish()
        if ends:
            self._mover.wake()
        return result

    def send(self, pages: SendPages) -> None:
        """Push pages to a peer once all steps launched so far have ended, as these steps compute the pages; never wait.

        The pages are handed to the page mover at once. It pushes them at once if no step is open.
        """
        if not self._open:
            self._mover.submit(pages)
            return
        done = LayersDone()
        self._open[-1].ends.append(done)
        self._mover.push(pages, done)

    def _push(self, step: ForwardStep) -> LayersDone:
        done = LayersDone()
        for push in step.pushes:
            self._mover.push(push, done)
        return done
