"""``python -P -m tools.peers.vllm_proxy PORT PREFILL_URL DECODE_URL``: pairs two vLLM servers.

A completion goes to the prefill server first, for one token and with the request to keep its KV. Its answer has
``kv_transfer_params``. The decode server then gets the whole request with them, and fetches the KV.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEEP_KV: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request to send to the prefill server: not streamed, for one token.

    It asks the server to keep the KV for the decode server.
    """
    changed = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": dict(KEEP_KV)}
    changed.pop("stream_options", None)
    return changed


def make_proxy(prefill: str, decode: str, transport: httpx.AsyncBaseTransport | None = None) -> Starlette:
    """Return the web application of a proxy to a pair of vLLM servers. ``prefill``, ``decode``: their base URLs.

    ``transport``: how it reaches the servers. None: over TCP.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, transport=transport) as client:
            app.state.client = client
            yield

    async def completions(request: Request) -> Response:
        client: httpx.AsyncClient = request.app.state.client
        body = json.loads(await request.body())
        first = await client.post(f"{prefill}/v1/completions", json=prefill_body(body))
        if first.status_code != 200:
            return Response(first.content, first.status_code, media_type="application/json")
        body["kv_transfer_params"] = first.json().get("kv_transfer_params")
        answer = await client.send(client.build_request("POST", f"{decode}/v1/completions", json=body), stream=True)

        async def relay() -> AsyncIterator[bytes]:
            try:
                async for data in answer.aiter_raw():
                    yield data
            finally:
                await answer.aclose()

        return StreamingResponse(relay(), answer.status_code, media_type=answer.headers.get("content-type"))

    async def models(request: Request) -> Response:
        client: httpx.AsyncClient = request.app.state.client
        return JSONResponse((await client.get(f"{decode}/v1/models")).json())

    async def health(_: Request) -> Response:
        return Response()

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    """Serve the proxy on the loopback address, with port and servers from the command line."""
    port, prefill, decode = sys.argv[1:]
    uvicorn.run(make_proxy(prefill, decode), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
