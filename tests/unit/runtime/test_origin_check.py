"""Web pages may not use a server that they were not allowed to."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.runtime.web.origin_check import host_name, is_loopback

BODY = {"text": "a", "sampling_params": {"max_new_tokens": 1}}


def answer(headers: dict[str, str], **options: Any) -> Any:
    async def run(engine: FakeEngine) -> Any:
        async with engine.http(**headers) as client:
            response = await client.post("/generate", json=BODY)
        assert bool(engine.requests) == (response.status_code == 200)
        return response

    return with_engine(run, **options)


OWN = ["localhost:30000", "127.0.0.1", "127.9.9.9:1", "[::1]:80", "LocalHost", "a.localhost"]
OTHERS = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", "", "[::1"]
STRANGE = [
    "https://evil.example",
    "null",
    "http://localhost:1",
    "https://localhost.evil.example",
    "file://",
    "localhost",
]


@pytest.mark.parametrize("host", OWN)
def test_a_loopback_server_is_called_by_its_own_names(host: str) -> None:
    assert answer({"host": host}).status_code == 200


@pytest.mark.parametrize("host", OTHERS)
def test_and_by_no_other(host: str) -> None:
    response = answer({"host": host})
    assert response.status_code == 403
    assert "--allowed-hosts" in response.json()["error"]["message"]
    assert response.headers["x-request-id"]


def test_names_can_be_allowed() -> None:
    assert answer({"host": "pd.example:443"}, allowed_hosts="other, PD.example").status_code == 200
    assert answer({"host": "evil.example"}, allowed_hosts="pd.example").status_code == 403
    assert answer({"host": "evil.example"}, allowed_hosts="*").status_code == 200


def test_a_server_that_others_reach_knows_not_all_its_names_and_one_with_keys_need_not() -> None:
    assert answer({"host": "evil.example"}, host="0.0.0.0").status_code == 200
    key = {"authorization": "Bearer secret"}
    assert answer({"host": "evil.example", **key}, api_key="secret").status_code == 200


@pytest.mark.parametrize("origin", STRANGE)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    response = answer({"origin": origin})
    assert response.status_code == 403
    assert "--allowed-origins" in response.json()["error"]["message"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_page_loads_without_an_origin_is_refused_and_a_link_is_not(site: str) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(**{"sec-fetch-site": site}) as client:
            image = await client.get("/health_generate", headers={"sec-fetch-mode": "no-cors"})
            assert (image.status_code, engine.requests) == (403, [])
            link = await client.get("/openapi.json", headers={"sec-fetch-mode": "navigate"})
            assert link.status_code == 200
        async with engine.http(**{"sec-fetch-site": "none"}) as client:
            assert (await client.get("/v1/models")).status_code == 200
        async with engine.http(**{"sec-fetch-site": "same-origin"}) as client:
            assert (await client.get("/v1/models")).status_code == 200

    with_engine(run)


def test_a_page_of_the_servers_own_is_not() -> None:
    assert answer({"origin": "http://localhost"}).status_code == 200
    assert answer({"origin": "https://localhost"}).status_code == 200


def test_origins_can_be_allowed_and_browsers_are_told() -> None:
    page = {"origin": "https://chat.example"}
    allowed = answer(page, allowed_origins="https://chat.example,https://b.example")
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert answer({"origin": "https://evil.example"}, allowed_origins="https://chat.example").status_code == 403
    assert answer(page, allowed_origins="*").headers["access-control-allow-origin"] == "*"


def test_a_browser_that_asks_first_is_answered_without_a_key() -> None:
    async def run(engine: FakeEngine) -> None:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        async with engine.http(origin="https://chat.example", **ask) as client:
            first = await client.options("/generate")
            assert first.status_code == 200
            assert "authorization" in first.headers["access-control-allow-headers"]
            assert (await client.post("/generate", json=BODY)).status_code == 401

    with_engine(run, api_key="secret", allowed_origins="https://chat.example")


def test_names_and_addresses() -> None:
    assert [host_name(host) for host in ("a:1", "[::1]:2", "[::1", "a b", "")] == ["a", "::1", "", "a b", ""]
    assert all(is_loopback(name) for name in ("::1", "127.1.2.3", "localhost", "x.localhost"))
    assert not any(is_loopback(name) for name in ("0.0.0.0", "localhost.", "x", "", "1.2.3.4"))
