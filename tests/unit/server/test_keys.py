"""Keys: the format of their files, the caller of a request, and what it may do."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from dataclasses import dataclass
from hashlib import blake2b, md5, sha1, sha256, sha512
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.router.options import RouterOptions, RouterOptionsError
from pdserve.runtime.options import OptionError, check_options
from pdserve.runtime.web import keys as keys_module
from pdserve.runtime.web.keys import ADMIN, ANYBODY, Caller, KeyFileError, Keys, caches_by_key, check_keys, read_keys
from pdserve.runtime.web.own_admin_key import draw_own_admin_key, own_admin_key
from pdserve.server.cluster_options import ClusterOptions, ClusterOptionsError
from pdserve.server.options import ServerOptions

QUICK_DIGESTS = (md5, sha1, sha256, sha512, blake2b)
ONE = {"text": "a", "sampling_params": {"max_new_tokens": 1}}


@dataclass
class Options:
    api_key: str | None = None
    api_key_file: str | None = None
    admin_key_file: str | None = None
    host: str = "127.0.0.1"
    no_keys: bool = False


def written(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Two users and an admin."""
    users = written(tmp_path, "users", "# ours\nalice a-key\n\nbob b-key\n")
    return {"api_key_file": users, "admin_key_file": written(tmp_path, "admin", "the-admin\n")}


def caller(keys: Keys, *headers: tuple[bytes, bytes]) -> Caller | None:
    return keys.caller(headers)


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + key.encode()


def test_files_and_an_option_are_read_together(files: dict[str, Any]) -> None:
    keys = read_keys(Options("third", **files))
    assert keys == Keys({"alice": "a-key", "bob": "b-key"}, "the-admin", unnamed=("third",))
    assert caller(keys, bearer("third")) == Caller("key-4ef4b2ce2c2031e0", is_admin=False)
    assert not read_keys(Options())


@pytest.mark.parametrize(
    ("users", "admin", "says"),
    [
        ("a b c\n", None, "users, line 1: write a key, or a name and a key"),
        ("# x\n\nschlüssel\n", None, "users, line 3: write a key"),
        ("# nothing\n", None, "has no key"),
        ("a/b key\n", None, "line 1: a name has up to 64"),
        (f"{'n' * 65} key\n", None, "line 1: a name has up to 64"),
        ("(admin) key\n", None, "line 1: a name has up to 64"),
        ("a one\na two\n", None, "line 2: this name or key was there before"),
        ("a one\nb one\n", None, "line 2: this name or key was there before"),
        ("one\n", "one\n", "admin, line 1: this key is a user's too"),
        ("one\n", "two\nthree\n", "admin, line 1: write nothing but the key"),
        ("one\n", "me two\n", "admin, line 1: write nothing but the key"),
    ],
)
def test_a_file_that_is_no_good_is_refused_with_the_line(
    tmp_path: Path, users: str, admin: str | None, says: str
) -> None:
    admin_file = None if admin is None else written(tmp_path, "admin", admin)
    with pytest.raises(KeyFileError) as caught:
        read_keys(Options(None, written(tmp_path, "users", users), admin_file))
    assert says in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"--admin-key-file .*nowhere can't be read"):
        read_keys(Options(None, None, str(tmp_path / "nowhere")))


OPEN_HOSTS = ["0.0.0.0", "::", "10.0.0.1", "example.org"]


@pytest.mark.parametrize("host", OPEN_HOSTS)
def test_what_other_hosts_reach_asks_for_keys_or_says_that_it_does_not(files: dict[str, Any], host: str) -> None:
    for given in ({}, {"admin_key_file": files["admin_key_file"]}):
        with pytest.raises(KeyFileError, match=f"--host {host} lets every client .*--api-key-file.*--no-keys"):
            check_keys(Options(host=host, **given))
        check_keys(Options(host=host, no_keys=True, **given))
        check_keys(Options(host="localhost", **given))
    check_keys(Options("one", host=host))
    check_keys(Options(host=host, api_key_file=files["api_key_file"]))


def test_every_command_that_listens_checks_that() -> None:
    with pytest.raises(OptionError, match="--no-keys"):
        check_options(ServerOptions(host="0.0.0.0"))
    with pytest.raises(RouterOptionsError, match="--no-keys"):
        RouterOptions(host="0.0.0.0", worker=["http://127.0.0.1:1"]).check()
    with pytest.raises(ClusterOptionsError, match="--no-keys"):
        ClusterOptions(host="0.0.0.0").check()
    check_options(ServerOptions(host="0.0.0.0", no_keys=True))
    RouterOptions(host="0.0.0.0", no_keys=True, worker=["http://127.0.0.1:1"]).check()
    ClusterOptions(host="0.0.0.0", no_keys=True).check()
    # The other hosts of an instance do not answer requests.
    check_options(ServerOptions(host="10.0.0.2", nnodes=2, node_rank=1, tp_size=2, dist_init_addr="10.0.0.1:5000"))


def test_keys_are_asked_for_where_they_are_given_whatever_else_is_said(files: dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(authorization="") as client:
            assert (await client.post("/generate", json=ONE)).status_code == 401

    with_engine(run, no_keys=True, **files)


def test_the_name_of_a_key_without_one_lasts_and_is_slow_to_guess_by(tmp_path: Path) -> None:
    file = written(tmp_path, "users", "first\nsecond\n")
    keys = read_keys(Options(api_key_file=file))
    names = {key: named(keys, key) for key in ("first", "second")}
    # Sessions are their owner's after a restart, and also when the line before is gone.
    again = read_keys(Options(api_key_file=written(tmp_path, "users", "second\n")))
    assert named(again, "second") == names["second"] != names["first"]
    for key, name in names.items():
        assert not any(name.removeprefix("key-") in new(key.encode()).hexdigest() for new in QUICK_DIGESTS)


def named(keys: Keys, key: str) -> str:
    found = caller(keys, bearer(key))
    assert found is not None
    return found.name


@pytest.fixture
def slow_hashes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the keys of which a slow hash was computed, in their order. No key is remembered from an earlier test."""
    computed: list[bytes] = []

    def scrypt(key: bytes, **parameters: Any) -> bytes:
        computed.append(key)
        return hashlib.scrypt(key, **parameters)

    monkeypatch.setattr(keys_module, "scrypt", scrypt)
    keys_module._digest_name.cache_clear()
    return computed


def test_a_key_without_a_name_costs_a_slow_hash_when_it_is_first_used_and_none_at_the_start(
    tmp_path: Path, slow_hashes: list[bytes]
) -> None:
    file = written(tmp_path, "users", "".join(f"key-number-{i}\n" for i in range(1000)))
    options = ServerOptions(api_key_file=file, host="0.0.0.0")
    check_options(options)
    assert caches_by_key(options)
    keys = read_keys(options)
    assert caller(keys, bearer("a-stranger's")) is None
    assert slow_hashes == []
    headers = [bearer("key-number-7")]
    assert keys.takes_long(headers)
    assert named(keys, "key-number-7") == named(keys, "key-number-7")
    assert not keys.takes_long(headers)
    assert slow_hashes == [b"key-number-7"]


def test_the_event_loop_does_not_wait_for_a_slow_hash(
    tmp_path: Path, slow_hashes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    scrypt = keys_module.scrypt

    def seen(key: bytes, **parameters: Any) -> bytes:
        threads.append(threading.current_thread())
        return scrypt(key, **parameters)

    monkeypatch.setattr(keys_module, "scrypt", seen)

    async def run(engine: FakeEngine) -> None:
        async with engine.http(authorization="Bearer second") as client:
            for _ in range(2):
                assert (await client.get("/v1/models")).status_code == 200

    with_engine(run, api_key_file=written(tmp_path, "users", "first\nsecond\n"))
    assert slow_hashes == [b"second"]
    assert threading.main_thread() not in threads


def test_who_is_who(files: dict[str, Any]) -> None:
    keys = read_keys(Options(**files))
    alice = Caller("alice", is_admin=False)
    assert caller(keys, bearer("a-key")) == alice
    assert caller(keys, (b"authorization", b"bearer a-key")) == alice
    assert caller(keys, (b"x-api-key", b"a-key")) == alice
    assert caller(keys, bearer("the-admin")) == Caller(ADMIN, is_admin=True)
    for wrong in (bearer(""), bearer("a-key "), bearer("A-KEY"), (b"authorization", b"a-key"), (b"x-other", b"a-key")):
        assert caller(keys, wrong) is None
    assert caller(keys) is None


def test_only_a_router_with_the_admin_key_speaks_for_its_clients(files: dict[str, Any]) -> None:
    keys = read_keys(Options(**files))
    name = (b"x-pdserve-key-name", b"carol")
    assert caller(keys, bearer("the-admin"), name) == Caller("carol", is_admin=False)
    assert caller(keys, bearer("a-key"), name) == Caller("alice", is_admin=False)
    # A client without a name has no identity: it is never the admin, even if its router shows the admin's key.
    for unfit in (b"", b"(admin)", b"\xff", b"n" * 65):
        assert caller(keys, bearer("the-admin"), (b"x-pdserve-key-name", unfit)) == Caller("", is_admin=False)


def test_an_only_key_may_do_everything_and_several_may_not(files: dict[str, Any]) -> None:
    only = caller(read_keys(Options("one")), bearer("one"))
    assert only is not None
    assert only.is_admin
    several = read_keys(Options("one", files["api_key_file"]))
    assert not any(caller(several, bearer(key)).is_admin for key in ("one", "a-key"))  # type: ignore[union-attr]


def test_without_keys_all_clients_are_one_user_and_may_name_another() -> None:
    for keys in (Keys({}), Keys({}).with_own_admin("drawn")):
        assert caller(keys) == caller(keys, bearer("anything")) == ANYBODY == Caller("", is_admin=False)
        assert caller(keys, (b"x-pdserve-key-name", b"alice")) == Caller("alice", is_admin=False)


def test_a_key_that_was_drawn_is_the_admins_only_where_no_other_is(files: dict[str, Any]) -> None:
    several = read_keys(Options(api_key_file=files["api_key_file"]))
    for keys in (Keys({}), several):
        assert caller(keys.with_own_admin("drawn"), bearer("drawn")) == Caller(ADMIN, is_admin=True)
        assert bool(keys.with_own_admin("drawn")) == bool(keys)
        assert keys.with_own_admin("drawn").are_several == keys.are_several
    for keys in (read_keys(Options("one")), read_keys(Options(**files)), Keys({}, "the-admin")):
        assert keys.with_own_admin("drawn") == keys


def test_the_key_that_was_drawn_can_be_read_by_the_user_who_runs_the_server(
    files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    assert draw_own_admin_key(Options(**files), tmp_path) is None
    assert own_admin_key(tmp_path) is None
    file = tmp_path / "admin-key"
    assert draw_own_admin_key(Options(), tmp_path) == file
    assert (own_admin_key(tmp_path), file.stat().st_mode & 0o777) == (file.read_text().strip(), 0o600)
    assert str(file) in caplog.text
    assert file.read_text().strip() not in caplog.text


STRANGER = {"rid": "r", "bootstrap_host": "127.0.0.1", "bootstrap_port": 1}
ORDERS: list[tuple[str, dict[str, Any]]] = [
    ("/drain", {}),
    ("/migrate", STRANGER),
    ("/role", {"role": "decode"}),
    ("/release_memory_occupation", {}),
    ("/resume_memory_occupation", {}),
    ("/kv/resize", {"max_total_tokens": 16}),
    ("/start_profile", {}),
    ("/stop_profile", {}),
    ("/abort_request", {"abort_all": True}),
]


@pytest.mark.parametrize(("path", "body"), ORDERS)
def test_without_keys_no_client_ends_or_changes_an_instance(path: str, body: dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        for key in ("", "Bearer anything"):
            async with engine.http(authorization=key) as client:
                refused = await client.post(path, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
                assert "--admin-key-file" in refused.json()["error"]["message"]
        assert (engine.questions, engine.aborts) == ([], [])

    with_engine(run)


def test_without_keys_all_clients_may_generate_look_flush_and_abort_what_they_can_name() -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(authorization="") as client:
            running = asyncio.create_task(client.post("/generate", json=ONE | {"rid": "mine"}))
            await engine.wait_for(lambda: bool(engine.requests))
            assert (await client.post("/abort_request", json={"rid": "mine"})).json()["aborted"] == 1
            assert (await running).status_code == 200
            assert (await client.post("/flush_cache")).status_code == 200
            info = (await client.get("/server_info")).json()
            assert (info["role"], "epoch" in info) == ("unified", False)

    with_engine(run, hold=True)


def test_with_an_admin_key_alone_every_client_is_a_user(files: dict[str, Any]) -> None:
    keys = read_keys(Options(admin_key_file=files["admin_key_file"]))
    assert caller(keys) == caller(keys, bearer("anything")) == Caller("", is_admin=False)


def test_what_others_see_is_changed_by_the_admin_alone(files: dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http(authorization="Bearer a-key") as client:
            refused = await client.post("/flush_cache")
            assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
            assert "--admin-key-file" in refused.json()["error"]["message"]
            assert (await client.post("/generate", json=ONE)).status_code == 200
            info = (await client.get("/server_info")).json()
            assert (info["role"], info["pool"]) == ("unified", {"in_use": 0})
            assert not {"options", "epoch", "disaggregation"} & info.keys()
        assert len(engine.questions) == 1
        async with engine.http(authorization="Bearer the-admin") as client:
            assert (await client.post("/flush_cache")).status_code == 200
            assert (await client.post("/generate", json=ONE)).status_code == 200
            assert (await client.get("/server_info")).json()["epoch"] == "e1"

    with_engine(run, **files)


SPELLINGS = ["/flush_cache%0A", "/flush_cache/", "/%66lush_cache", "//flush_cache", "/v1/models/../../flush_cache"]


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_spelling_of_a_path_leads_a_user_to_what_is_the_admins(files: dict[str, Any], path: str) -> None:
    async def run(engine: FakeEngine) -> None:
        answer = await as_user(engine, "a-key").post(httpx.URL("http://localhost").copy_with(raw_path=path.encode()))
        assert answer.status_code in (403, 404, 405)
        assert engine.questions == []

    with_engine(run, **files)


def test_a_path_that_is_not_declared_a_users_is_the_admins(files: dict[str, Any]) -> None:
    """Every path of the app, but for those named: what comes later falls under it."""

    async def run(engine: FakeEngine) -> None:
        page = (await as_user(engine, "a-key").get("/openapi.json")).json()
        admins = {"/flush_cache", "/migrate", "/drain", "/role", "/transfers"}
        admins |= {"/release_memory_occupation", "/resume_memory_occupation", "/kv/resize", "/kv/hashes"}
        admins |= {"/start_profile", "/stop_profile"}
        for path, operations in page["paths"].items():
            for method in operations:
                answer = await as_user(engine, "a-key").request(method, path.replace("{name}", "x"), json={})
                assert (answer.status_code == 403) == (path in admins), path

    with_engine(run, mute=False, **files)


def as_user(engine: FakeEngine, key: str) -> httpx.AsyncClient:
    return engine.http(authorization=f"Bearer {key}")


def test_carefully_chosen_names_lead_to_no_other_request(files: dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        names = ["job", *(f"job~{i}" for i in range(1, 12))]
        body = {"text": [ONE["text"]] * len(names), "rid": names, "sampling_params": ONE["sampling_params"]}
        before = asyncio.create_task(as_user(engine, "b-key").post("/generate", json=body))
        await engine.wait_for(lambda: len(engine.requests) == len(names))
        task = asyncio.create_task(as_user(engine, "a-key").post("/generate", json={**ONE, "rid": "job"}))
        await engine.wait_for(lambda: len(engine.requests) == len(names) + 1)
        wire = [request.rid for request in engine.requests]
        assert len(set(wire)) == len(wire)
        for request in engine.requests:
            engine.step(request, 0)
        assert (await task).json()["meta_info"]["id"] == "job"
        assert [answer["meta_info"]["id"] for answer in (await before).json()] == names

    with_engine(run, hold=True, **files)


def test_an_abort_ends_ones_own_and_the_admins_ends_any(files: dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        async def begin(key: str, count: int) -> asyncio.Task[httpx.Response]:
            task = asyncio.create_task(as_user(engine, key).post("/generate", json={**ONE, "rid": "same"}))
            await engine.wait_for(lambda: len(engine.requests) == count)
            return task

        async def abort(key: str, **what: Any) -> int:
            answer = await as_user(engine, key).post("/abort_request", json=what)
            return int(answer.json()["aborted"])

        # Both call theirs the same: neither learns of the other's by that.
        tasks = [await begin("a-key", 1), await begin("b-key", 2)]
        wire = [request.rid for request in engine.requests]
        assert await abort("b-key", rid="other") == 0
        assert await abort("b-key", rid="same") == 1
        assert [order.rid for order in engine.aborts] == [wire[1]]
        await tasks[1]
        assert await abort("b-key", abort_all=True) == 0
        tasks[1] = await begin("b-key", 3)
        assert await abort("a-key", abort_all=True) == 1
        assert [order.rid for order in engine.aborts] == [wire[1], wire[0]]
        await tasks[0]
        tasks[0] = await begin("a-key", 4)
        assert await abort("the-admin", rid="same") == 2
        await asyncio.gather(*tasks)

    with_engine(run, hold=True, **files)


@pytest.mark.parametrize("apart", [False, True, None])
def test_prefixes_are_kept_apart_by_key_where_there_are_several(files: dict[str, Any], apart: bool | None) -> None:
    async def run(engine: FakeEngine) -> None:
        for key, salt in (("a-key", None), ("b-key", None), ("a-key", "s"), ("b-key", "alice\0s")):
            body = ONE if salt is None else {**ONE, "extra_key": salt}
            assert (await as_user(engine, key).post("/generate", json=body)).status_code == 200
        spaces = [request.extra_key for request in engine.requests]
        if apart is not False:
            assert spaces == ["alice\0", "bob\0", "alice\0s", "bob\0alice\0s"]
        else:
            assert spaces == ["", "", "s", "alice\0s"]

    with_engine(run, cache_by_key=apart, **files)


def test_one_key_or_none_has_one_cache(files: dict[str, Any]) -> None:
    for options, apart in (
        ({}, False),
        ({"api_key": "only"}, False),
        ({"admin_key_file": files["admin_key_file"]}, True),
    ):
        assert caches_by_key(ServerOptions(**options)) is apart
        assert caches_by_key(ServerOptions(**options, cache_by_key=not apart)) is not apart
