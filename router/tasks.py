"""Helpers that end tasks and read their errors."""

from __future__ import annotations

import asyncio
import logging

from ..runtime.web.errors import without_frames
from .errors import RouterError

logger = logging.getLogger(__name__)


async def drop(*tasks: asyncio.Task[object]) -> None:
    """Cancel ``tasks``, all at once, and wait until they have closed their connections.

    Their errors are only logged.
    """
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if error := failure_of(task):
            logger.debug("what was dropped had failed: %s", error)


def failure_of(task: asyncio.Task[object]) -> BaseException | None:
    """Return the error of a task that has ended, a ``RouterError`` without its frames; None if it has none.

    None also means that it was cancelled. A task keeps its error, and the error's frames, until its result is read. The
    frames refer back to the task, for example by ``asyncio.Timeout``, and keep the request's body in memory (see
    ``without_frames``).
    """
    try:
        task.result()
    except asyncio.CancelledError:
        return None
    except RouterError as e:
        e.__context__ = None  # an error that is on its way through the caller keeps its frames
        return without_frames(e)
    except Exception as e:  # noqa: BLE001  Told with its frames: it is a fault of ours.
        return e
    return None
