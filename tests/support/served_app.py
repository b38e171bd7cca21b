"""A fake engine's app on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.runtime.web.ports import listen
from pdserve.runtime.web.server import ChildServer, server_config
from support.fake_engine import FakeEngine


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[int]:
    """Serve the engine's app on a free port, and yield the port."""
    listener = listen("127.0.0.1", 0, 16)
    port = listener.getsockname()[1]
    started = asyncio.Event()
    server = ChildServer(server_config(engine.app, engine.options, log_level="error"), started.set)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await started.wait()
    try:
        yield port
    finally:
        server.should_exit = True
        await task
