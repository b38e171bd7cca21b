"""How many requests a server works on at once, path by path. Each request waits until the test lets it go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.router_rig import scenario

from pdserve.runtime.web.access_log import SCOPE_KEY as VISIT_KEY
from pdserve.runtime.web.access_log import AccessRecord
from pdserve.runtime.web.apis import PATHS, path_table
from pdserve.runtime.web.auth import ApiKeyAuth
from pdserve.runtime.web.keys import ADMIN, ANYBODY, SCOPE_KEY, Caller, Keys
from pdserve.runtime.web.paths import PathFacts, Server
from pdserve.runtime.web.request_limit import RequestLimit

TABLE = path_table(Server.ROUTER)
ANSWERED_BY_ITSELF = {"/", "/ping", "/health", "/readyz", "/livez", "/metrics", "/metrics/targets"}
PASSED_ON = [facts for facts in PATHS if Server.ROUTER in facts.servers and facts.path not in ANSWERED_BY_ITSELF]
BESIDE = {"/health_generate", "/abort_request"}
"""Paths that a server under load still serves."""
ADMINS = Caller(ADMIN, is_admin=True)


class Limited:
    """A server that works on one request at a time, and on each until ``go_on``."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.limit = RequestLimit(self._app, TABLE, 1)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, path: str, caller: Caller) -> int:
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {"type": "http", "path": path, "method": "GET", "headers": [], SCOPE_KEY: caller}
        await self.limit(scope, None, send)  # type: ignore[arg-type]
        return statuses[0]

    async def statuses(self, *asked: tuple[str, Caller]) -> list[int]:
        """Ask all of them in this order, and let go on what was let in."""
        tasks = [asyncio.create_task(self.ask(*each)) for each in asked]
        for _ in range(5):
            await asyncio.sleep(0)
        self.go_on.set()
        return [await task for task in tasks]


def statuses(*asked: tuple[str, Caller]) -> list[int]:
    async def run() -> list[int]:
        return await Limited().statuses(*asked)

    return asyncio.run(run())


def concrete(facts: PathFacts) -> str:
    return facts.path.partition("{")[0] + ("x" if "{" in facts.path else "")


@pytest.mark.parametrize("facts", PASSED_ON, ids=lambda facts: facts.path)
def test_what_a_router_passes_on_has_a_limit(facts: PathFacts) -> None:
    """Also what it leaves to its instances to refuse, since it has no keys itself."""
    path = concrete(facts)
    assert statuses((path, ANYBODY), (path, ANYBODY)) == [200, 503]
    assert statuses(("/generate", ANYBODY), (path, ANYBODY)) == [200, 200 if facts.path in BESIDE else 503]


def test_an_admins_order_is_always_served() -> None:
    orders = [facts.path for facts in PATHS if facts.access.is_admins and Server.ROUTER in facts.servers]
    assert orders
    for path in orders:
        assert statuses(("/generate", ANYBODY), (path, ADMINS), (path, ADMINS)) == [200, 200, 200]


@pytest.mark.parametrize("path", sorted(ANSWERED_BY_ITSELF))
def test_what_a_router_answers_itself_is_always_served(path: str) -> None:
    assert statuses(("/generate", ANYBODY), (path, ANYBODY), (path, ANYBODY)) == [200, 200, 200]


@scenario(max_concurrent_requests=1)
async def test_a_router_without_keys_asks_its_instances_for_handovers_once_at_a_time(rig: Any) -> None:
    instance = await rig.instance()
    client = await rig.route(worker=[instance])
    client.headers["authorization"] = "Bearer of-the-instances"
    instance.holds = "/transfers"
    asked = asyncio.create_task(client.get("/transfers"))
    await instance.arrived.wait()
    refused = await client.get("/transfers")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    instance.go_on.set()
    assert (await asked).status_code == 200
    assert [path for _, path, _ in instance.questions].count("/transfers") == 1


@pytest.mark.parametrize("keys", [Keys({}), Keys({}).with_own_admin("drawn")], ids=["no key", "a key that it drew"])
def test_a_router_without_keys_passes_on_no_order_that_shows_none(keys: Keys) -> None:
    """Every instance would refuse it. A key that is shown may be that of the instances."""
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    auth = ApiKeyAuth(app, keys, TABLE, is_router=True, signs=True)

    async def ask(path: str, *headers: tuple[bytes, bytes]) -> list[int]:
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
        await auth(scope | {VISIT_KEY: AccessRecord(scope)}, None, send)  # type: ignore[arg-type]
        return statuses

    assert asyncio.run(ask("/transfers")) == [401]
    assert passed == []
    assert asyncio.run(ask("/transfers", (b"authorization", b"Bearer of-the-instances"))) == []
    assert asyncio.run(ask("/server_info")) == []
    assert passed == ["/transfers", "/server_info"]
