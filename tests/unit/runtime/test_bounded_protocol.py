"""Connections that strangers hold open, and what others log of them."""

from __future__ import annotations

import asyncio
import logging

import pytest
import uvicorn
from support.machine import limit
from uvicorn.server import ServerState

from pdserve.runtime import refusal_log
from pdserve.runtime.refusal_log import LogQuota
from pdserve.runtime.web.bounded_protocol import MAX_CONNECTIONS, bounded_protocol


class Transport(asyncio.Transport):
    """One that takes for ever to close."""

    aborted = 0

    def is_closing(self):
        return self.aborted > 0

    def abort(self):
        self.aborted += 1

    def get_extra_info(self, name, default=None):
        return default


async def connect(count):
    protocol, config, state = (
        bounded_protocol(),
        uvicorn.Config(lambda: None, http="h11", log_config=None),
        ServerState(),
    )
    config.load()
    transports = [Transport() for _ in range(count)]
    connections = []
    for transport in transports:
        connections.append(protocol(config, state, {}))
        connections[-1].connection_made(transport)
    for connection in connections:
        connection._forget()  # timers
    return [t.aborted for t in transports]


def test_a_flood_ends_the_oldest_each_once_though_none_of_them_is_gone_yet():
    aborted = asyncio.run(connect(3 * MAX_CONNECTIONS))
    assert aborted == [1] * (2 * MAX_CONNECTIONS) + [0] * MAX_CONNECTIONS


def test_servers_count_their_connections_apart():
    async def two():
        return await asyncio.gather(connect(MAX_CONNECTIONS), connect(MAX_CONNECTIONS))

    assert [sum(aborted) for aborted in asyncio.run(two())] == [0, 0]


class Wire(Transport):
    """One that keeps what is written."""

    closed = False

    def __init__(self):
        super().__init__()
        self.data = b""

    def write(self, data):
        self.data += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed


@pytest.mark.parametrize("comes_late", [False, True])
def test_what_is_no_http_in_a_body_is_refused_once_and_is_no_fault_of_ours(caplog, comes_late):
    async def talk():
        answered = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            answered.set()

        config, wire = uvicorn.Config(app, http="h11", log_config=None), Wire()
        config.load()
        connection = bounded_protocol()(config, ServerState(), {})
        connection.connection_made(wire)
        head = b"PUT / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.data_received(head if comes_late else head + b"this is no chunk\r\n")
        await asyncio.wait_for(answered.wait(), limit(5))
        if comes_late:
            connection.data_received(b"this is no chunk\r\n")
        connection.connection_lost(None)
        return wire.data

    said = asyncio.run(talk())
    assert said.startswith(b"HTTP/1.1 401 " if comes_late else b"HTTP/1.1 400 ")
    assert said.count(b"HTTP/1.1") == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def logger():
    logger = logging.getLogger("test_log_quota")
    yield logger
    logger.filters.clear()


def test_a_flood_of_records_is_cut_and_counted(logger, caplog):
    now = [0.0]
    logger.addFilter(LogQuota(lambda: now[0]))
    for i in range(100):
        logger.error("bad request %d", i)
    assert len(caplog.records) == refusal_log.LINES
    now[0] += refusal_log.SECONDS
    logger.error("bad request %d", 100)
    assert (
        caplog.records[-1].getMessage()
        == f"({100 - refusal_log.LINES} more like the last ones were not logged) bad request 100"
    )
