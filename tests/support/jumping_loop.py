"""An event loop that never waits for a timer: where nothing else can happen, its clock jumps to the next one."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

START = 1000.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """Real sockets, of this process only: what they send is there at once, so nothing needs to be waited for."""

    def __init__(self) -> None:
        self.now = START
        super().__init__(_Selector(self._jump))

    def time(self) -> float:
        """Return the loop's time in seconds. It does not pass by itself."""
        return self.now

    def _jump(self, seconds: float) -> None:
        self.now += seconds


class _Selector(selectors.SelectSelector):
    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready. If nothing is, let ``timeout`` pass at once."""
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self._jump(timeout)
        return ready


def run_jumping(main: Coroutine[Any, Any, None]) -> None:
    """Like ``asyncio.run``."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main)
