"""Work on a thread that the process does not wait for at its end.

A read from a dead mount may hang for ever. With ``asyncio.to_thread``, the loop and the interpreter would wait for it
before they end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Run ``work`` on a daemon thread called ``name``, and return its result or raise its error.

    If the caller is cancelled, the thread is left running.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # so that the caller's cancellation does not reach it

    def run() -> None:
        try:
            value = work()
        except Exception as e:  # noqa: BLE001  It is raised at the caller.
            result.set_exception(e)
        else:
            result.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(result)
