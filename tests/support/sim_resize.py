"""Simulated instances with a pool that gets other sizes. Memory that was given back holds nothing usable."""

from __future__ import annotations

from typing import Any

from pdserve.messages.base import Message
from pdserve.messages.memory import PoolTrimmed, ResizeReq, ResizeResult, TrimPool
from pdserve.messages.question import RefusedAnswer
from pdserve.runtime.machine.memory import Memory
from pdserve.scheduler.features.pool_resize import PoolResize
from pdserve.scheduler.handlers import Handlers

from .sim import SimInstance
from .sim_tiers import TieredSim

PLENTY = Memory(1 << 40, 1 << 40)
FREED = 7


class Resized:
    """Beside a ``SimInstance``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.resize = PoolResize(self.scheduler, lambda: PLENTY)  # type: ignore[attr-defined]
        self.outbox.flush()  # type: ignore[attr-defined]

    def plan(self: Any) -> None:
        """See ``SimInstance``."""
        self.resize.tick(self.now)
        super().plan()  # type: ignore[misc]

    def on_command(self: Any, message: Message) -> None:
        """Give memory back as the worker would."""
        if not isinstance(message, TrimPool):
            super().on_command(message)  # type: ignore[misc]
            return
        size = self.options.page_size
        for kv, first in zip(self.worker.pools(), (message.first, message.first_window), strict=False):
            kv[first * size :] = -1
        self.resize.on_trimmed(PoolTrimmed(FREED), self.now)

    def ask(self: Any, question: ResizeReq) -> None:
        """Ask for another size."""
        Handlers(self.outbox, self.resize).handle(question, self.now)

    def order(self: Any, tokens: int, wait_s: float = 0.0) -> Any:
        """Ask, and let the worker do what there is; the answer, None: not yet."""
        self.ask(ResizeReq(tokens, wait_s, id=3))
        return self.resize_answer()

    def resize_answer(self: Any) -> Any:
        """Return the answer to a resize, if there is one by now."""
        self.outbox.flush()
        if any(isinstance(m, TrimPool) for m in self.to_worker.messages):
            while self.work():
                pass
        answers = [
            m for m in (*self.answers, *self.to_detokenizer.messages) if isinstance(m, ResizeResult | RefusedAnswer)
        ]
        self.answers[:] = [m for m in self.answers if not isinstance(m, ResizeResult | RefusedAnswer)]
        for answer in answers:
            if answer in self.to_detokenizer.messages:
                self.to_detokenizer.messages.remove(answer)
        assert len(answers) <= 1
        return answers[0] if answers else None


class ResizedSim(Resized, SimInstance):
    """A pool alone."""


class ResizedTieredSim(Resized, TieredSim):
    """With tiers behind it."""
