"""Every path, with every method and key, at a router and at an instance: from the one table that both go by."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from support.fake_engine import FakeEngine

from pdserve.router import app as router_app
from pdserve.router.errors import parse_error
from pdserve.router.fleet import Fleet
from pdserve.router.metrics import RouterMetrics
from pdserve.router.options import RouterOptions
from pdserve.runtime.web.access_log import AccessCounts
from pdserve.runtime.web.apis import PATHS, path_table
from pdserve.runtime.web.auth import ApiKeyAuth
from pdserve.runtime.web.guard import guard
from pdserve.runtime.web.keys import Caller, Keys
from pdserve.runtime.web.paths import Access, PathFacts, PathTable, Server
from pdserve.server.options import ServerOptions

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
KEYS = {"none": {}, "wrong": {"authorization": "Bearer x"}, "user": {"x-api-key": "a-key"}}
KEYS["admin"] = {"authorization": "bearer the-admin"}
MAY = {
    Access.OPEN: {"none", "wrong", "user", "admin"},
    Access.METRICS: {"user", "admin"},
    Access.USER: {"user", "admin"},
    Access.CACHE: {"admin"},
    Access.ADMIN: {"admin"},
    Access.ROUTER_ADMIN: {"admin"},
}
NOT_THE_USERS = {
    Access.OPEN: {"/", "/health", "/ping", "/readyz", "/livez", "/moved"},
    Access.METRICS: {"/metrics", "/metrics/targets"},
    Access.CACHE: {"/flush_cache"},
    Access.ADMIN: {"/transfers", "/kv/resize", "/kv/hashes", "/migrate", "/drain", "/role"}
    | {"/release_memory_occupation", "/resume_memory_occupation", "/start_profile", "/stop_profile"},
    Access.ROUTER_ADMIN: {"/workers"},
}
ERROR_FIELDS = {"message", "type", "code", "param", "status"}


class Seen:
    """An application behind the checks: records what reaches it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests.append((scope["method"], scope["path"]))
        await Response(b"{}", media_type="application/json")(scope, receive, send)


class Front:
    """What stands before one server's application."""

    def __init__(self, server: Server, **options: Any) -> None:
        self.seen, self.table, counts = Seen(), path_table(server), AccessCounts()
        self.counts = counts
        self.app: ASGIApp
        if server is Server.INSTANCE:
            self.app = guard(self.seen, ServerOptions(**options), server, counts)
        else:
            router = RouterOptions(worker=["http://127.0.0.1:1"], **options)
            metrics = RouterMetrics(Fleet(router), counts)
            self.app = guard(self.seen, router, server, counts, metrics.observe)

    def http(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "users").write_text("alice a-key\nbob b-key\n")
    (tmp_path / "admin").write_text("the-admin\n")
    return {"api_key_file": str(tmp_path / "users"), "admin_key_file": str(tmp_path / "admin")}


def path_of(facts: PathFacts) -> str:
    """Return a path that a declaration matches."""
    return re.sub(r"\{.*\}", "x", facts.path)


def answered(front: Front, path: str) -> list[str]:
    """Return the methods of all declarations that match ``path``, as an ``Allow`` header has them."""
    matching = [f for f in front.table.paths if re.fullmatch(re.sub(r"\{.*\}", ".+", f.path), path)]
    methods = [method for facts in matching for method in facts.methods]
    return [*methods, *(["HEAD"] if "GET" in methods else []), *(["OPTIONS"] if methods else [])]


def on_both(check: Callable[[Front], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        for server in (Server.INSTANCE, Server.ROUTER):
            await check(Front(server, **options))

    asyncio.run(run())


def is_error(answer: httpx.Response, status: int) -> bool:
    if answer.request.method == "HEAD":
        return answer.status_code == status
    error = parse_error(answer.content) or {}
    # An API with types and codes of its own has pdserve's as kind and reason.
    own = {"type": error.get("kind", error["type"]), "code": error.get("reason", error["code"])}
    error = {name: value for name, value in error.items() if name not in ("kind", "reason")} | own
    kind = "permission_error" if status == 403 else "invalid_request_error"  # as OpenAI
    return (answer.status_code, error["status"], error["type"], error.keys()) == (status, status, kind, ERROR_FIELDS)


def test_what_others_see_is_the_admins_and_what_is_open_is_named_here() -> None:
    for access, paths in NOT_THE_USERS.items():
        assert {facts.path for facts in PATHS if facts.access is access} == paths


def test_who_may_do_what(keys: dict[str, str]) -> None:
    async def check(front: Front) -> None:
        async with AsyncExitStack() as stack:
            clients = {name: await stack.enter_async_context(front.http(**KEYS[name])) for name in KEYS}
            for facts in (*PATHS, None):
                path = "/nowhere" if facts is None else path_of(facts)
                allowed = answered(front, path)
                for method in METHODS:
                    for name, client in clients.items():
                        front.seen.requests.clear()
                        answer = await client.request(method, path)
                        check_answer(front, facts, allowed, name, answer)

    def check_answer(
        front: Front, facts: PathFacts | None, allowed: list[str], name: str, answer: httpx.Response
    ) -> None:
        method, path = answer.request.method, answer.request.url.path
        exists = facts is not None and facts in front.table.paths
        case = (path, method, name)
        reached = bool(front.seen.requests)
        access = facts.access if exists and facts is not None else Access.USER
        if name not in MAY[access]:
            expected = 403 if name == "user" else 401
            assert is_error(answer, expected), case
        elif not exists:
            assert is_error(answer, 404), case
            assert method == "HEAD" or answer.json()["error"]["code"] == "unknown_url"
        elif facts is not None and method == "OPTIONS":
            assert (answer.status_code, answer.headers["allow"]) == (204, ", ".join(allowed))
        elif facts is not None and method not in allowed:
            assert is_error(answer, 405), case
            assert answer.headers["allow"] == ", ".join(allowed)
        else:
            expected_method = "GET" if method == "HEAD" else method
            assert (answer.status_code, front.seen.requests) == (200, [(expected_method, path)]), case
        assert reached == (answer.status_code == 200), case

    on_both(check, **keys)


def test_without_keys_no_client_is_the_admin_and_a_router_leaves_it_to_the_instances() -> None:
    async def check(front: Front) -> None:
        is_instance = front.table.find("/drain") is not None
        for facts in front.table.paths:
            for name, headers in KEYS.items():
                async with front.http(**headers) as client:
                    answer = await client.request(facts.methods[0], path_of(facts))
                case = (facts.path, name)
                # An order that shows no key is refused everywhere: a router has nothing to pass on.
                refused = facts.access is Access.ADMIN and (is_instance or not headers)
                if refused or facts.access is Access.ROUTER_ADMIN:
                    assert is_error(answer, 401), case
                    assert "--admin-key-file" in answer.json()["error"]["message"]
                else:
                    assert answer.status_code == 200, case

    on_both(check)


def test_head_is_answered_wherever_get_is() -> None:
    table = path_table(Server.INSTANCE)
    for facts in table.paths:
        methods = table.methods(path_of(facts))
        assert set(facts.methods) <= set(methods)
        assert ("GET" in methods) == ("HEAD" in methods)


def test_slashes_at_the_end_do_not_count(keys: dict[str, str]) -> None:
    async def check(front: Front) -> None:
        for facts in front.table.paths:
            if "{" in facts.path:
                continue
            for end in ("/", "//"):
                front.seen.requests.clear()
                async with front.http(**KEYS["admin"]) as client:
                    answer = await client.request(facts.methods[0], f"http://localhost{facts.path}{end}")
                assert (answer.status_code, front.seen.requests) == (200, [(facts.methods[0], facts.path)])
                # The rules are those of the path itself.
                async with front.http(**KEYS["user"]) as client:
                    answer = await client.request(facts.methods[0], f"http://localhost{facts.path}{end}")
                assert answer.status_code == (200 if "user" in MAY[facts.access] else 403)
        assert {label for _, label, _ in front.counts.responses} == {
            p.path for p in front.table.paths if "{" not in p.path
        }

    on_both(check, **keys)


@pytest.mark.parametrize("path", ["/Health", "/HEALTH", "//health", "/health/x", "", "/v1/models/../x", "/v1"])
def test_other_spellings_do_not_exist(path: str) -> None:
    for server in (Server.INSTANCE, Server.ROUTER):
        assert path_table(server).find(path) is None


def test_metrics_are_open_where_that_is_asked_for(keys: dict[str, str]) -> None:
    async def check(front: Front) -> None:
        async with front.http() as client:
            assert (await client.get("/metrics")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401

    on_both(check, metrics_without_key=True, **keys)


def test_both_log_the_client_that_a_trusted_proxy_tells(caplog: pytest.LogCaptureFixture) -> None:
    async def check(front: Front) -> None:
        caplog.clear()
        async with front.http(**{"x-forwarded-for": "9.9.9.9"}) as client:
            assert (await client.get("/v1/models")).status_code == 200
        [line] = [record.getMessage() for record in caplog.records if record.name == "pdserve.access"]
        assert line.startswith("9.9.9.9 ")

    with caplog.at_level(logging.INFO, "pdserve.access"):
        on_both(check, trusted_proxies="127.0.0.1")


@pytest.mark.parametrize("facts", PATHS, ids=lambda facts: facts.path)
def test_preflights_allow_what_a_path_has(keys: dict[str, str], facts: Any) -> None:
    async def check(front: Front) -> None:
        path = path_of(facts)
        ask = {"origin": "https://chat.example", "access-control-request-headers": "authorization,content-type"}
        for method in METHODS:
            async with front.http(**ask) as client:
                answer = await client.options(path, headers={"access-control-request-method": method})
            allowed = facts in front.table.paths and method in answered(front, path)
            if allowed:
                assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ask["origin"])
                assert method in answer.headers["access-control-allow-methods"].split(", ")
            else:
                assert is_error(answer, 400)
        strange = {"access-control-request-method": facts.methods[0], "access-control-request-headers": "\x7f"}
        async with front.http(origin="https://chat.example", **strange) as client:
            assert is_error(await client.options(path), 400)
        async with front.http(origin="https://evil.example", **ask_for(facts.methods[0])) as client:
            assert is_error(await client.options(path), 400)
        assert not front.seen.requests

    on_both(check, allowed_origins="https://chat.example", **keys)


def ask_for(method: str) -> dict[str, str]:
    return {"access-control-request-method": method}


def routes(app: Any) -> dict[str, set[str]]:
    while not isinstance(app, Starlette):
        app = app._app if hasattr(app, "_app") else app.app
    found: dict[str, set[str]] = {}
    for route in app.routes:
        found.setdefault(route.path, set()).update(route.methods - {"HEAD"})
    return found


def declared(server: Server) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for facts in path_table(server).paths:
        found.setdefault(facts.path, set()).update(facts.methods)
    return found


def test_every_route_is_in_the_table_and_every_path_has_a_route() -> None:
    async def run() -> None:
        table = declared(Server.INSTANCE)
        assert routes(FakeEngine().app) == table

    asyncio.run(run())
    options = RouterOptions(worker=["http://127.0.0.1:1"])
    table = declared(Server.ROUTER)
    assert routes(router_app.make_app(options, lambda error: None)) == table


def test_what_is_no_http_is_not_let_through() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("reached without a key")

    auth = ApiKeyAuth(app, Keys({}), PathTable(PATHS))
    with pytest.raises(NotImplementedError):
        asyncio.run(auth({"type": "websocket", "headers": [], "path": "/health"}, None, None))  # type: ignore[arg-type]


def test_a_key_is_found_without_looking_at_the_others() -> None:
    class Counted(str):
        encoded = 0

        def encode(self, *args: Any, **kwargs: Any) -> bytes:
            Counted.encoded += 1
            return super().encode(*args, **kwargs)

    keys = Keys({f"user-{i}": Counted(f"key-{i}") for i in range(100)})
    before = Counted.encoded
    for i in range(100):
        caller = keys.caller([(b"authorization", b"Bearer key-%d" % i)])
        assert caller == Caller(f"user-{i}", is_admin=False)
    assert keys.caller([(b"authorization", b"Bearer key-100")]) is None
    assert keys.caller([(b"authorization", b"Bearer ")]) is None
    assert Counted.encoded == before
