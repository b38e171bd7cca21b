"""A client of a cluster lets an instance prove itself, and signs its requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.endpoints import ENDPOINTS, GENERATION_BODIES, GENERATION_PATHS
from support.fake_engine import FakeEngine, with_engine

from pdserve.runtime import cluster_secret
from pdserve.runtime.cluster_secret import FRESH_SECONDS, ClusterSecret, RouterKeys
from pdserve.runtime.web.access_log import SCOPE_KEY as VISIT_KEY
from pdserve.runtime.web.access_log import AccessRecord
from pdserve.runtime.web.apis import path_table
from pdserve.runtime.web.auth import ApiKeyAuth
from pdserve.runtime.web.client.client import HttpClient
from pdserve.runtime.web.client.errors import CannotConnect
from pdserve.runtime.web.cluster_auth import (
    CHALLENGE_HEADER,
    INLINE_BYTES,
    PROOF_HEADER,
    SIGNATURE_HEADER,
    ClusterClient,
    ClusterServer,
    Signed,
    digest_of,
)
from pdserve.runtime.web.keys import KEY_NAME_HEADER, Keys
from pdserve.runtime.web.paths import AtRouter, Server

OURS, THEIRS = b"o" * 32, b"t" * 40
EPOCH, NOW = "e1", 1_000_000.0
URL = "http://10.0.0.1:8000"
ALICE = ((KEY_NAME_HEADER, b"alice"),)
BODY = orjson.dumps({"text": "hi", "sampling_params": {"max_new_tokens": 1}})


def client(*secrets: bytes) -> ClusterClient:
    return ClusterClient(ClusterSecret(secrets or (OURS,)))


def router(*secrets: bytes) -> ClusterClient:
    return ClusterClient(ClusterSecret(secrets or (OURS,)).for_routers())


def digest(*pieces: bytes | memoryview) -> bytes:
    return blake2b(b"".join(pieces), digest_size=32).hexdigest().encode()


def server(*secrets: bytes, epoch: str = EPOCH) -> ClusterServer:
    return ClusterServer(ClusterSecret(secrets or (OURS,)), epoch, "0.0.0.0", 30000)


def test_an_instance_proves_who_it_is() -> None:
    challenge = ClusterClient.challenge()
    assert challenge != ClusterClient.challenge()
    proof = server().proof([(CHALLENGE_HEADER, challenge)])
    assert client().proven(challenge, proof, URL) == EPOCH.encode()
    assert router().proven(challenge, proof, URL) == EPOCH.encode()
    assert client(THEIRS).proven(challenge, proof, URL) is None
    assert router(THEIRS).proven(challenge, proof, URL) is None
    assert client().proven(ClusterClient.challenge(), proof, URL) is None
    assert client().proven(challenge, None, URL) is None
    assert proof is not None
    assert client().proven(challenge, proof.replace(b"e1", b"e2"), URL) is None
    for odd in (b"", b"x", b"." * 40, b"e1.", proof * 9):
        assert client().proven(challenge, odd, URL) is None
    for odd in ([], [(CHALLENGE_HEADER, b"short")], [(CHALLENGE_HEADER, b"." * 32)]):
        assert server().proof(odd) is None


def test_a_proof_is_of_one_address() -> None:
    """A process that has taken an instance's port could let another one answer the challenge."""
    challenge = ClusterClient.challenge()
    local = ClusterServer(ClusterSecret((OURS,)), EPOCH, "127.0.0.1", 30000).proof([(CHALLENGE_HEADER, challenge)])
    assert client().proven(challenge, local, "http://127.0.0.1:30000") == EPOCH.encode()
    assert client().proven(challenge, local, "http://127.0.0.1:30001") is None
    assert client().proven(challenge, (local or b"").replace(b".30000.", b".30001."), "http://127.0.0.1:30001") is None
    proof, router = server().proof([(CHALLENGE_HEADER, challenge)]), client()
    assert router.proven(challenge, proof, URL) == EPOCH.encode()
    assert router.proven(challenge, proof, "http://10.0.0.2:8000") is None
    assert router.proven(challenge, proof, URL) == EPOCH.encode()


@pytest.mark.parametrize(("asks", "answers"), [((OURS,), (THEIRS, OURS)), ((THEIRS, OURS), (OURS, THEIRS))])
def test_a_secret_can_be_changed_while_requests_come(asks: tuple[bytes, ...], answers: tuple[bytes, ...]) -> None:
    router, instance = client(*asks), server(*answers)
    challenge = router.challenge()
    assert router.proven(challenge, instance.proof([(CHALLENGE_HEADER, challenge)]), URL) == b"e1"
    _, signature = router.sign(b"e1", "GET", "/metrics", (), digest(), NOW)
    assert not isinstance(instance.check(signature, "GET", b"/metrics", (), NOW), str)


def test_a_signature_is_of_one_request_to_one_instance_and_counts_once() -> None:
    name, signature = client().sign(
        EPOCH.encode(), "POST", "/generate?a=1", ALICE, digest(b"ab", memoryview(b"c")), NOW
    )
    assert name == SIGNATURE_HEADER
    good: dict[str, Any] = {"method": "POST", "target": b"/generate?a=1", "headers": ALICE, "now": NOW}
    for change in (
        {"method": "GET"},
        {"target": b"/generate"},
        {"headers": ()},
        {"headers": ((KEY_NAME_HEADER, b"bob"),)},
        {"now": NOW + FRESH_SECONDS + 1},
        {"now": NOW - FRESH_SECONDS - 1},
    ):
        assert isinstance(server().check(signature, **(good | change)), str)
    assert isinstance(server(THEIRS).check(signature, **good), str)
    assert isinstance(server(epoch="e2").check(signature, **good), str)
    for odd in (b"", b"...", signature[:-1], signature.replace(b".", b",", 1), b"1." + signature):
        assert isinstance(server().check(odd, **good), str)
    instance = server()
    signed = instance.check(signature, **good)
    assert not isinstance(signed, str)
    assert signed.caller == b"alice"
    assert isinstance(instance.check(signature, **good), str)


# --- an instance's application ---


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, text in (("secret", OURS.decode()), ("keys", "alice a-key\nbob b-key\n"), ("admin", "the-admin\n")):
        (tmp_path / name).write_text(text)
    paths = ("cluster_secret_file", "secret"), ("api_key_file", "keys"), ("admin_key_file", "admin")
    return {option: str(tmp_path / name) for option, name in paths}


async def ask(
    engine: FakeEngine, path: str, caller: bytes = b"", body: bytes = BODY, method: str = "POST", **headers: str
) -> int:
    """Status of a signed request. ``headers`` come on top, or replace what was signed."""
    named = ((KEY_NAME_HEADER, caller),) if caller else ()
    signature = client().sign(EPOCH.encode(), method, path, named, digest(body), time.time())
    sent = {name.decode(): value.decode() for name, value in (*named, signature)} | headers
    async with engine.http(**sent) as http:
        return (await http.request(method, path, content=BODY if method == "POST" else b"")).status_code


def test_an_instance_that_can_remember_no_more_signatures_refuses_and_forgets_none(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_secret, "MAX_REMEMBERED", 1)

    async def run(engine: FakeEngine) -> None:
        assert await ask(engine, "/generate", b"alice") == 200
        assert await ask(engine, "/generate", b"alice") == 503
        assert len(engine.requests) == 1
        for path in ("/health", "/livez", "/metrics", "/server_info", "/v1/models"):
            assert await ask(engine, path, b"alice", body=b"", method="GET") == 200, path
        assert await ask(engine, "/health_generate", b"alice", body=b"", method="GET") == 503

    with_engine(run, **files)


@pytest.mark.parametrize("path", GENERATION_PATHS)
def test_bootstrap_addresses_are_followed_if_a_router_has_signed_the_request(path: str, files: dict[str, str]) -> None:
    named = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
    body = orjson.dumps({**GENERATION_BODIES[path], "stream": False, **named})

    async def run(engine: FakeEngine) -> None:
        signature = client().sign(EPOCH.encode(), "POST", path, ALICE, digest(body), time.time())
        signed = {name.decode(): value.decode() for name, value in (*ALICE, signature)}
        for headers, refused in ((signed, False), ({"authorization": "Bearer a-key"}, True)):
            async with engine.http(**headers) as http:
                await http.post(path, content=body)
            where = engine.requests[-1].bootstrap
            assert where is not None
            assert (where.host, where.room, "only a router" in where.refusal) == ("10.0.0.1", 7, refused)

    with_engine(run, handover="on", **files)


@pytest.mark.parametrize("seconds", [1, 100_000])
def test_after_a_jump_of_the_clock_and_back_requests_pass_and_none_does_twice(seconds: int) -> None:
    """The clocks of router and instance jump together, as they do on one host."""
    here, jump = 1000.0, 86_400
    instance = ClusterServer(ClusterSecret((OURS,)), EPOCH, "0.0.0.0", 30000, monotonic=lambda: here)
    asking = client()

    def sign(wall: float) -> bytes:
        return asking.sign(EPOCH.encode(), "POST", "/generate", ALICE, digest(BODY), wall)[1]

    def passes(signature: bytes, wall: float) -> bool:
        return isinstance(instance.check(signature, "POST", b"/generate", ALICE, wall), Signed)

    before = sign(NOW)
    assert passes(before, NOW)
    here += seconds
    ahead = NOW + jump + seconds
    during = sign(ahead)
    assert passes(during, ahead)
    assert not passes(during, ahead)
    here += 1
    back = NOW + seconds + 1
    assert passes(sign(back), back)
    assert not passes(before, back)
    assert not passes(during, back)
    here += 1
    assert passes(sign(back + 1), back + 1)


def test_only_requests_that_read_may_be_repeated(files: dict[str, str]) -> None:
    async def run(engine: FakeEngine) -> None:
        for method, path, again in (("GET", "/metrics", 200), ("HEAD", "/metrics", 200), ("POST", "/generate", 401)):
            body = BODY if method == "POST" else b""
            once = client().sign(EPOCH.encode(), method, path, (), digest(body), time.time())
            sent = {once[0].decode(): once[1].decode(), "authorization": "Bearer a-key"}
            async with engine.http(**sent) as http:
                statuses = [(await http.request(method, path, content=body)).status_code for _ in range(2)]
            assert statuses == [200, again], (method, path)

    with_engine(run, **files)


def test_a_signed_request_is_its_callers_and_needs_no_key(files: dict[str, str]) -> None:
    async def run(engine: FakeEngine) -> None:
        assert await ask(engine, "/generate", b"alice") == 200
        assert await ask(engine, "/flush_cache", b"alice") == 403
        assert await ask(engine, "/flush_cache", b"(admin)") == 200
        assert await ask(engine, "/generate") == 401  # a router that asked for no key, and a client without
        assert await ask(engine, "/generate", authorization="Bearer b-key") == 200
        assert [request.key_name for request in engine.requests] == ["alice", "bob"]

    with_engine(run, **files)


def test_what_is_not_signed_is_refused_or_has_no_owner(files: dict[str, str]) -> None:
    async def run(engine: FakeEngine) -> None:
        assert await ask(engine, "/generate", b"alice", **{KEY_NAME_HEADER.decode(): "bob"}) == 401
        assert await ask(engine, "/generate", b"alice", **{SIGNATURE_HEADER.decode(): "1.2.3.4"}) == 401
        async with engine.http(**{KEY_NAME_HEADER.decode(): "alice"}) as http:
            assert (await http.post("/generate", content=BODY)).status_code == 401
        async with engine.http(**{KEY_NAME_HEADER.decode(): "(admin)"}) as http:
            assert (await http.post("/flush_cache")).status_code == 401
        await ask(engine, "/generate", b"alice", body=b"another body")  # as if the client had left
        assert engine.requests == []

    with_engine(run, **files)


def test_an_instance_without_keys_believes_a_signed_name_alone(files: dict[str, str]) -> None:
    async def run(engine: FakeEngine) -> None:
        assert await ask(engine, "/generate", b"alice") == 200
        async with engine.http(**{KEY_NAME_HEADER.decode(): "alice"}) as http:
            assert (await http.post("/generate", content=BODY)).status_code == 200
        assert [request.key_name for request in engine.requests] == ["alice", ""]

    with_engine(run, cluster_secret_file=files["cluster_secret_file"])


def test_without_a_secret_a_signature_means_nothing(files: dict[str, str]) -> None:
    del files["cluster_secret_file"]

    async def run(engine: FakeEngine) -> None:
        assert await ask(engine, "/generate", b"alice") == 401
        assert PROOF_HEADER.decode() not in (await challenged(engine)).headers

    with_engine(run, **files)


async def challenged(engine: FakeEngine, path: str = "/livez") -> Any:
    async with engine.http(**{CHALLENGE_HEADER.decode(): "a" * 32}) as http:
        return await http.get(path)


def test_the_proof_is_given_to_every_client_that_asks_for_it(files: dict[str, str]) -> None:
    async def run(engine: FakeEngine) -> None:
        proof = (await challenged(engine)).headers[PROOF_HEADER.decode()]
        assert client().proven(b"a" * 32, proof.encode(), "http://127.0.0.1:30000") == EPOCH.encode()
        assert PROOF_HEADER.decode() not in (await challenged(engine, "/health")).headers

    with_engine(run, **files)


# --- a router ---


def visited() -> dict[str, Any]:
    """Return what the access log has put into a scope."""
    return {VISIT_KEY: AccessRecord({"type": "http", "method": "POST", "path": "/generate", "headers": []})}


@pytest.mark.parametrize(("signs", "sent"), [(True, [b"alice", b"(admin)"]), (False, [b"alice", None])])
def test_no_key_leaves_a_router_that_signs(signs: bool, sent: list[bytes | None]) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    async def run() -> None:
        keys, table = Keys({"alice": "a-key"}, "the-admin"), path_table(Server.ROUTER)
        auth = ApiKeyAuth(app, keys, table, is_router=True, signs=signs)
        for key in (b"a-key", b"the-admin"):
            path = "/flush_cache" if key != b"a-key" else "/generate"
            scope = {"type": "http", "method": "POST", "path": path, **visited()}
            await auth(scope | {"headers": [(b"authorization", b"Bearer " + key)]}, None, None)  # type: ignore[arg-type]

    asyncio.run(run())
    for headers, name in zip(map(dict, seen), sent, strict=True):
        assert headers.get(KEY_NAME_HEADER) == name
        assert headers.get(b"authorization") == (None if signs else b"Bearer the-admin")


def test_a_router_without_keys_passes_the_clients_on(files: dict[str, str]) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    auth = ApiKeyAuth(app, Keys({}), path_table(Server.ROUTER), is_router=True, signs=True)
    headers = [(b"authorization", b"Bearer a-key")]
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers, **visited()}
    asyncio.run(auth(scope, None, None))  # type: ignore[arg-type]
    assert dict(seen[0]) == {b"authorization": b"Bearer a-key"}


def test_the_key_that_a_router_without_keys_drew_is_the_admins_at_every_instance(files: dict[str, str]) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    keys = Keys({}).with_own_admin("drawn")
    auth = ApiKeyAuth(app, keys, path_table(Server.ROUTER), is_router=True, signs=True)
    headers = [(b"authorization", b"Bearer drawn"), (KEY_NAME_HEADER, b"alice")]
    scope = {"type": "http", "method": "POST", "path": "/abort_request", "headers": headers, **visited()}
    asyncio.run(auth(scope, None, None))  # type: ignore[arg-type]
    assert seen == [[(KEY_NAME_HEADER, b"(admin)")]]

    async def run(engine: FakeEngine) -> None:
        assert await ask(engine, "/drain", b"(admin)", body=BODY) == 400  # it was let in: a prompt is no order
        assert await ask(engine, "/drain") == 401

    with_engine(run, cluster_secret_file=files["cluster_secret_file"])


# --- a stranger at an instance's port ---

Answer = Callable[[bytes], bytes]


def against(
    answer: Answer, run: Callable[[HttpClient, str], Awaitable[None]], proof_seconds: float = 60.0
) -> list[bytes]:
    """Return what is sent to a server that answers each request with ``answer`` of its head."""
    heard: list[bytes] = []
    serving: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())  # type: ignore[arg-type]
        while head := await reader.read(65536):
            heard.append(head)
            writer.write(answer(head))
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        http = HttpClient([], 60.0, cluster=ClusterClient(ClusterSecret((OURS,)), proof_seconds))
        await run(http, url)
        http.close()
        listener.close()
        await asyncio.wait(serving)

    asyncio.run(main())
    return heard


def ok(*headers: bytes) -> bytes:
    return b"\r\n".join((b"HTTP/1.1 200 OK", b"content-length: 2", *headers, b"", b"{}"))


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: ok(),
        lambda _: ok(b"x-pdserve-proof: e1." + b"0" * 64),
        lambda _: ok(b"connection: close"),
        lambda _: b"nonsense\r\n\r\n",
        lambda _: b"",
    ],
    ids=["no proof", "a wrong one", "closing", "no HTTP", "silence"],
)
def test_a_stranger_gets_neither_key_nor_prompt_and_serves_no_client(answer: Answer) -> None:
    async def run(http: HttpClient, url: str) -> None:
        for _ in range(2):
            with pytest.raises(CannotConnect, match="the server there"):
                await http.send("POST", url, "/generate", b"the prompt", [(b"authorization", b"Bearer a-key"), *ALICE])

    heard = against(answer, run, proof_seconds=0.2)
    assert heard
    assert all(head.startswith(b"GET /livez ") for head in heard)
    assert not any(word in head for head in heard for word in (b"prompt", b"a-key", b"alice"))


def test_a_silent_server_has_the_time_for_a_proof_and_not_that_for_a_connection() -> None:
    async def run(http: HttpClient, url: str) -> None:
        with pytest.raises(CannotConnect, match=r"does not answer /livez within 0\.2 s"):
            await http.fetch("GET", url, "/health")

    assert len(against(lambda _: b"", run, proof_seconds=0.2)) == 1


def test_a_connection_is_proven_once_and_its_requests_are_signed() -> None:
    instance = server()

    def answer(head: bytes) -> bytes:
        lines = head.split(b"\r\n\r\n")[0].split(b"\r\n")[1:]
        proof = instance.proof([tuple(line.split(b": ", 1)) for line in lines])  # type: ignore[misc]
        return ok(b"x-pdserve-proof: " + proof) if proof else ok()

    async def run(http: HttpClient, url: str) -> None:
        for _ in range(3):
            assert (await http.fetch("POST", url, "/generate", b"the prompt", ALICE)).status == 200

    heard = against(answer, run)
    assert [head.split(b" ", 2)[1] for head in heard] == [b"/livez", *[b"/generate"] * 3]
    for head in heard[1:]:
        headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n\r\n")[0].split(b"\r\n")[1:])
        signed = instance.check(headers[SIGNATURE_HEADER], "POST", b"/generate", ALICE, time.time())
        assert not isinstance(signed, str)


def test_a_relayed_proof_is_of_the_challenge_it_was_given_for() -> None:
    old = server().proof([(CHALLENGE_HEADER, ClusterClient.challenge())])

    async def run(http: HttpClient, url: str) -> None:
        with pytest.raises(CannotConnect):
            await http.fetch("GET", url, "/health")

    against(lambda _: ok(b"x-pdserve-proof: " + (old or b"")), run)


def test_a_routers_key_signs_for_instances_and_stands_in_for_none() -> None:
    header, signature = router().sign(EPOCH.encode(), "GET", "/x", (), digest(), NOW)
    assert header == SIGNATURE_HEADER
    assert not isinstance(server().check(signature, "GET", b"/x", (), NOW), str)
    _, foreign = router(THEIRS).sign(EPOCH.encode(), "GET", "/x", (), digest(), NOW)
    assert isinstance(server().check(foreign, "GET", b"/x", (), NOW), str)

    class Impostor(ClusterSecret):
        """What an instance would be that has a router's key instead of the secret."""

        def for_routers(self) -> RouterKeys:
            return RouterKeys(self._secrets)

    challenge = ClusterClient.challenge()
    keys = ClusterSecret((OURS,)).for_routers()._secrets
    proof = ClusterServer(Impostor(keys), EPOCH, "0.0.0.0", 30000).proof([(CHALLENGE_HEADER, challenge)])
    assert router().proven(challenge, proof, URL) == EPOCH.encode()
    assert client().proven(challenge, proof, URL) is None


def test_a_long_body_is_hashed_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    async def to_thread(work: Callable[..., bytes], *args: Any) -> bytes:
        threads.append(1)
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    for body, aside in ((bytes(INLINE_BYTES), 0), (bytes(INLINE_BYTES + 1), 1)):
        threads.clear()
        assert asyncio.run(digest_of([body[:9], memoryview(body)[9:]])) == digest(body)
        assert len(threads) == aside


def test_bodies_that_a_router_signs_unread_have_no_bootstrap_fields() -> None:
    """It removes clients' fields where it chooses instances, and passes other bodies on as they are."""
    named = {facts for facts, found in ENDPOINTS.items() if found.body and "bootstrap_host" in found.body.model_fields}
    unread = {facts.path for facts in named if facts.at_router in (AtRouter.ASK_ONE, AtRouter.OWN)}
    assert len(named) > len(GENERATION_PATHS)
    assert not unread
