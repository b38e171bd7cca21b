"""Bodies of registrations that are not complete, or compressed, are refused without an exception."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.disaggregation.bootstrap.registry import Registry
from pdserve.disaggregation.bootstrap.server import make_app

SECRET = "secret"


async def answer(headers: dict[str, str], *received: dict[str, Any]) -> int:
    """Send a PUT with the body of ``received``; return the status."""
    messages, sent = iter(received), []
    head = [(name.encode(), value.encode()) for name, value in {"authorization": f"Bearer {SECRET}", **headers}.items()]
    scope = {"type": "http", "method": "PUT", "path": "/registration", "query_string": b"", "headers": head}

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await make_app(Registry(lambda: 0.0), SECRET)(scope, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("headers", "received", "status"),
    [
        ({}, [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}], 400),
        ({"content-encoding": "gzip"}, [{"type": "http.request", "body": b"{}", "more_body": False}], 415),
    ],
)
def test_a_body_that_breaks_off_or_is_compressed_raises_nothing(
    headers: dict[str, str], received: list[dict[str, Any]], status: int
) -> None:
    assert asyncio.run(answer(headers, *received)) == status
