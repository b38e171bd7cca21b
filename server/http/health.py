"""Whether this instance can serve: asked around the whole ring, not guessed."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from ...messages.control import Ping, Pong
from .engine_client import EngineClient
from .errors import ApiError

PING_TIMEOUT_SECONDS = 1.0
CACHE_SECONDS = 0.2


class Verdict(NamedTuple):
    """``reason`` says why not."""

    ready: bool
    reason: str = ""


class HealthCheck:
    """One ping at a time goes round the ring; who asks meanwhile, or up to 0.2 s later, gets the same verdict."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._asking: asyncio.Task[Verdict] | None = None
        self._answered_at = 0.0

    async def verdict(self) -> Verdict:
        """Takes at most ``PING_TIMEOUT_SECONDS``."""
        fresh = self._asking is not None and (
            not self._asking.done() or time.monotonic() - self._answered_at < CACHE_SECONDS
        )
        if self._asking is None or not fresh:
            self._asking = asyncio.create_task(self._ask())
        # A client that goes must not take the ping away from the others.
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Verdict:
        try:
            pong = await self._engine.ask(lambda id_: Ping(id=id_), Pong, PING_TIMEOUT_SECONDS)
            return Verdict(pong.ready, pong.reason)
        except TimeoutError:
            return Verdict(False, f"no answer round the ring of processes within {PING_TIMEOUT_SECONDS:g} s")
        except ApiError as e:
            return Verdict(False, e.message)
        finally:
            self._answered_at = time.monotonic()
