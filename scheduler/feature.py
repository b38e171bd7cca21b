"""A part of the scheduler process beside the scheduler itself: one file each, in ``features/``.

A feature gets what it needs in its constructor. It declares the messages that it handles with the decorators of
``handlers.py``. ``instance.py`` makes all features and calls the methods below. A feature overrides those that it has
something to say to.
"""

from __future__ import annotations

import math
from typing import Any

from ..messages.metrics import Family


class Feature:
    """Base of the features. Called from the scheduler's loop only; no call blocks. ``now`` is ``time.monotonic()``."""

    def tick(self, now: float) -> None:
        """Advance what is under way. Called once a tick of the loop."""

    def seconds_left(self, now: float) -> float:
        """Return the seconds until ``tick`` has something to do without a message; infinity for never."""
        return math.inf

    def status(self, now: float) -> dict[str, Any]:
        """Return this feature's fields of ``/server_info``, ready for JSON.

        A field that is an object itself is added to one of the same name.
        """
        return {}

    def metrics(self, now: float) -> list[Family]:
        """Return this feature's metrics."""
        return []

    def problem(self, now: float) -> str | None:
        """Return why the instance cannot serve although its processes are well, or None if it can."""
        return None

    def warning(self, now: float) -> str | None:
        """Return what an operator should look at although the instance can serve, or None."""
        return None
