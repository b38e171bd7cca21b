"""A sample of what hostile HTTP clients do; ``make test-hostile`` does ten thousand times as much to real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from support.fake_engine import FakeEngine
from support.hostile_http import HostileClient, good_requests
from support.machine import limit
from support.router_rig import Rig
from support.served_app import serving

CASES = 70


@asynccontextmanager
async def instance() -> AsyncIterator[int]:
    async with serving(FakeEngine()) as port:
        yield port


@asynccontextmanager
async def router() -> AsyncIterator[int]:
    """Run a router before an instance that is the real app, on a fake engine."""
    rig = Rig()
    async with serving(FakeEngine()) as port:
        worker = await rig.instance()
        await worker.kill()
        worker.port = port
        client = await rig.route(worker=[worker])
        try:
            yield client.base_url.port or 0
        finally:
            await rig.close()


@pytest.mark.parametrize("front", [instance, router], ids=["instance", "router"])
def test_after_anything_the_next_good_request_is_served(front: Callable[[], AsyncIterator[int]]) -> None:
    async def run() -> None:
        async with front() as port:  # type: ignore[attr-defined]
            hostile = HostileClient(port, seed=40, seconds=limit(10.0))
            with good_requests(port, limit(10.0)) as ask:
                await asyncio.to_thread(hostile.run, CASES, ask)
            assert len(hostile.cases) == 14
            assert {200, 400, 404} <= hostile.statuses.keys()

    uvloop.run(asyncio.wait_for(run(), limit(60.0)))
