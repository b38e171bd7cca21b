"""Steps between their launch and their result.

A processor that computes steps itself is through with one when its launch returns, and tells the result at once. A
device that computes beside the worker is given one step more before the worker waits for it, so that it never runs out
of work while the host packs a result, or plans. The worker waits for the next step or the end of the oldest one,
whichever is first (``has_result``): the scheduler sends a step only after it was told a result, so a worker that waits
for an end alone finds the next step's message when the device has nothing left to do.

Pages that a step pushes to a peer may go layer by layer while it is computed (``runtime/layers_done.py``); all of it is
there when the result is.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..messages.worker import ForwardStep, SendPages, StepResult
from ..runtime.layers_done import LayersDone

if TYPE_CHECKING:
    from ..disaggregation.transfer.engine import TransferEngine
    from .step_runner import Launched


class Steps(Protocol):
    """The part of ``StepRunner`` that the queue calls."""

    def launch(self, step: ForwardStep, done: LayersDone | None = None) -> Launched:
        """See ``StepRunner``."""
        ...

    def is_done(self, launched: Launched) -> bool:
        """See ``StepRunner``."""
        ...

    def collect(self, launched: Launched) -> StepResult:
        """See ``StepRunner``."""
        ...


class _Open(NamedTuple):
    """``ends``: what counts its layers, and others that only its end is told."""

    launched: Launched
    ends: list[LayersDone]


class StepQueue:
    """``ahead``: so many steps may be open while another is launched. ``engine``: pushes pages; None: nobody does."""

    def __init__(self, steps: Steps, engine: TransferEngine | None, ahead: int) -> None:
        self._steps = steps
        self._engine = engine
        self._ahead = ahead
        self._open: deque[_Open] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def use(self, steps: Steps) -> None:
        """Have ``steps`` compute what is launched from now on, and collect what is open."""
        self._steps = steps

    @property
    def is_full(self) -> bool:
        """Whether the oldest result should be waited for before anything else is launched."""
        return len(self._open) > self._ahead

    @property
    def has_result(self) -> bool:
        """Whether the oldest step has ended, so that ``collect`` does not wait. There is one."""
        return self._steps.is_done(self._open[0].launched)

    def launch(self, step: ForwardStep) -> None:
        """Have the step computed."""
        done = self._push(step) if step.pushes else None
        self._open.append(_Open(self._steps.launch(step, done), [] if done is None else [done]))

    def collect(self) -> StepResult:
        """The oldest step's result; waits for it. There is one."""
        launched, ends = self._open.popleft()
        result = self._steps.collect(launched)
        for done in ends:
            done.finish()
        if ends and self._engine is not None:
            self._engine.wake()
        return result

    def send(self, pages: SendPages) -> None:
        """Push pages that steps launched so far compute, when the last of these has ended: the device may be behind."""
        if self._engine is None:
            raise RuntimeError("an instance without hand-overs was asked to push pages")
        if not self._open:
            self._engine.submit(pages)
            return
        done = LayersDone()
        self._open[-1].ends.append(done)
        self._engine.push(pages, done)

    def _push(self, step: ForwardStep) -> LayersDone:
        if self._engine is None:
            raise RuntimeError("an instance without hand-overs was asked to push pages")
        done = LayersDone()
        for push in step.pushes:
            self._engine.push(push, done)
        return done
