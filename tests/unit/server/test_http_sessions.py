"""Sessions over HTTP: their owners, their permitted names, and what is asked of the engine for them."""

from __future__ import annotations

import asyncio
from urllib.parse import unquote

import msgspec
import pytest
from support.admin_key import ADMIN_KEY
from support.fake_engine import FakeEngine, events, with_engine
from support.sim import make_generate

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.moves import RunningRequest
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.sessions import ReleaseReq, SessionState, SnapshotReq, SnapshotResult

KV = "stored"
STATE = SessionState(
    running=RunningRequest(make_generate("r", [1, 2, 3], max_new_tokens=9, stop_ids=[7]), pack_i32([4, 5]), 9, 0.0),
    fingerprint="f",
    kv_seed=bytes(16),
)
KEYS = {"alice": "Bearer a-key", "bob": "Bearer b-key", "admin": "Bearer the-admin"}


@pytest.fixture
def options(tmp_path):
    return {"kv_sessions_dir": str(tmp_path / "sessions")}


@pytest.fixture
def keyed(tmp_path, options):
    (tmp_path / "users").write_text("alice a-key\nbob b-key\n")
    (tmp_path / "admin").write_text("the-admin\n")
    return options | {"api_key_file": str(tmp_path / "users"), "admin_key_file": str(tmp_path / "admin")}


def knows(engine: FakeEngine, state: SessionState | None = STATE) -> None:
    engine.snapshot = SnapshotResult(state, "", 4, 4096) if state else RefusedAnswer(404, "")


async def run_one(engine: FakeEngine, rid: str, **headers: str) -> asyncio.Task:
    """Start a request that runs until it is aborted."""

    async def ask():
        async with engine.http(**headers) as client:
            return await client.post("/generate", json={"text": "x", "rid": rid})

    count, task = len(engine.requests), asyncio.create_task(ask())
    await engine.wait_for(lambda: len(engine.requests) > count)
    return task


async def saved(engine: FakeEngine, name: str, **headers: str) -> dict:
    """Save a session of a request that has ended."""
    knows(engine)
    async with engine.http(**headers) as client:
        await client.post("/generate", json={"text": "x", "rid": "done"})
        answer = await client.post("/kv/snapshot", json={"name": name, "rid": "done"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_without_a_folder_they_are_off_and_say_how_to_have_them():
    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            answers = [
                await client.post("/kv/snapshot", json={"name": "a", "rid": "r"}),
                await client.post("/kv/restore", json={"name": "a"}),
                await client.get("/kv/sessions"),
                await client.delete("/kv/sessions/a"),
                await client.post("/slots/0?action=save", json={"filename": "a"}),
            ]
        assert {(a.status_code, "--kv-sessions-dir" in a.text) for a in answers} == {(501, True)}

    with_engine(run)


def test_each_key_means_its_own_requests_and_sessions(keyed):
    alice, bob, admin = ({"authorization": KEYS[name]} for name in ("alice", "bob", "admin"))

    async def run(engine: FakeEngine) -> None:
        knows(engine)
        task = await run_one(engine, "r", **alice)
        async with engine.http(**alice) as a, engine.http(**bob) as b, engine.http(**admin) as c:
            assert (await b.post("/kv/snapshot", json={"name": "s", "rid": "r"})).status_code == 404
            assert not [q for q in engine.questions if isinstance(q, SnapshotReq)]
            made = await a.post("/kv/snapshot", json={"name": "s", "rid": "r", "ttl_s": 60})
            assert (made.status_code, made.json()["kv"], made.json()["output_tokens"]) == (200, KV, 2)
            assert made.json()["expires"] - made.json()["created"] == pytest.approx(60, abs=0.01)
            assert [s["name"] for s in (await a.get("/kv/sessions")).json()["sessions"]] == ["s"]
            assert (await b.get("/kv/sessions")).json() == {"sessions": []}
            [listed] = (await c.get("/kv/sessions")).json()["sessions"]
            assert (listed["owner"], listed["kv_tokens"]) == ("alice", 4)
            for client, body, status in (
                (b, {"name": "s"}, 404),
                (b, {"name": "s", "owner": "alice"}, 403),
                (c, {"name": "s"}, 404),
                (c, {"name": "s", "owner": "a\0b"}, 400),
                (c, {"name": "s", "owner": "../key-alice"}, 400),
                (c, {"name": "s", "owner": "alice", "resume": False}, 200),
            ):
                engine.hold = False
                assert (await client.post("/kv/restore", json=body)).status_code == status, body
            assert (await b.delete("/kv/sessions/s")).status_code == 404
            assert (await b.delete("/kv/sessions/s?owner=alice")).status_code == 403
            for owner in ("%00", "a" * 3000):
                assert (await c.delete(f"/kv/sessions/s?owner={owner}")).status_code == 400
            assert (await c.delete("/kv/sessions/s?owner=alice")).status_code == 200
            await a.post("/abort_request", json={"rid": "r"})
        await task

    with_engine(run, hold=True, **keyed)


def test_a_name_of_the_engine_that_another_key_has_now_is_not_asked_for(keyed):
    alice, bob = ({"authorization": KEYS[name]} for name in ("alice", "bob"))

    async def run(engine: FakeEngine) -> None:
        knows(engine)
        async with engine.http(**alice) as a:
            await a.post("/generate", json={"text": "x", "rid": "r"})
            assert (await a.post("/kv/snapshot", json={"name": "s", "rid": "r"})).status_code == 200
            async with engine.http(**bob) as b:
                assert (await b.post("/kv/snapshot", json={"name": "s", "rid": "r"})).status_code == 404
            engine.hold = True
            task = await run_one(engine, "r", **bob)
            asked = len(engine.questions)
            assert (await a.post("/kv/snapshot", json={"name": "t", "rid": "r"})).status_code == 404
            assert len(engine.questions) == asked
        async with engine.http(**bob) as b:
            await b.post("/abort_request", json={"rid": "r"})
        await task

    with_engine(run, **keyed)


def test_of_several_answers_one_has_to_be_named(options):
    async def run(engine: FakeEngine) -> None:
        knows(engine)
        await engine.post("/generate", {"text": "x", "rid": "r", "sampling_params": {"n": 2, "max_new_tokens": 2}})
        said = await engine.post("/kv/snapshot", {"name": "s", "rid": "r"})
        assert (said.status_code, '"r-0"' in said.json()["error"]["message"]) == (400, True)
        assert (await engine.post("/kv/snapshot", {"name": "s", "rid": "r-1"})).status_code == 200

    with_engine(run, **options)


@pytest.mark.parametrize(
    "prompt", [{"text": "a bb"}, {"input_ids": [1, 2]}, {"messages": [{"role": "user", "content": "x"}]}]
)
def test_a_prompt_is_computed_and_no_more(options, prompt):
    async def run(engine: FakeEngine) -> None:
        start = msgspec.structs.replace(STATE, running=msgspec.structs.replace(STATE.running, output=b""))
        knows(engine, start)
        body = {"name": "s", "sampling_params": {"max_new_tokens": 16, "sampling_seed": 5}, "extra_key": "k", **prompt}
        made = await engine.post("/kv/snapshot", body)
        assert (made.status_code, made.json()["output_tokens"]) == (200, 0)
        [asked] = [q for q in engine.questions if isinstance(q, SnapshotReq)]
        [request] = engine.requests
        assert (asked.rid, asked.with_output) == (request.rid, False)
        assert (request.sampling.seed, request.extra_key) == (5, "k")
        assert not engine.client.live.is_named(request.rid)
        assert (await engine.post("/kv/restore", {"name": "s"})).json()["resumable"] is True
        assert (await engine.post("/kv/restore", {"name": "s", "resume": True})).json()["output_ids"]

    with_engine(run, **options)


@pytest.mark.parametrize("resume", [True, False])
def test_what_its_deadline_cut_off_goes_on_without_one(options, resume):
    async def run(engine: FakeEngine) -> None:
        request = msgspec.structs.replace(STATE.running.request, timeout_s=0.5)
        knows(engine, msgspec.structs.replace(STATE, running=msgspec.structs.replace(STATE.running, request=request)))
        await engine.post("/generate", {"text": "x", "rid": "done"})
        await engine.post("/kv/snapshot", {"name": "s", "rid": "done"})
        assert (await engine.post("/kv/restore", {"name": "s", "resume": resume})).status_code == 200
        assert [resumed.state.running.request.timeout_s for resumed in engine.resumed] == [0.0]

    with_engine(run, **options)


def test_it_goes_on_as_it_was_meant_under_a_name_of_its_own(options):
    async def run(engine: FakeEngine) -> None:
        await saved(engine, "s")
        whole = await engine.post("/kv/restore", {"name": "s", "rid": "again"})
        assert whole.json()["meta_info"]["id"] == "again"
        assert whole.json()["output_ids"] == list(range(9))
        parts = events(await engine.post("/kv/restore", {"name": "s", "stream": True, "incremental": True}))
        assert [i for part in parts for i in part["output_ids"]] == list(range(9))
        first, second = (resumed.state for resumed in engine.resumed)
        assert (first.running.output, first.running.request.stream, second.running.request.stream) == (
            STATE.running.output,
            False,
            True,
        )
        assert first.running.request.rid == "again"
        assert first.running.request.sampling == STATE.running.request.sampling

    with_engine(run, **options)


def test_the_kv_alone_is_asked_for_without_the_last_token(options):
    async def run(engine: FakeEngine) -> None:
        await saved(engine, "s")
        said = (await engine.post("/kv/restore", {"name": "s", "resume": False, "return_token_ids": True})).json()
        assert said == {
            **{"name": "s", "tokens": 5, "cached_tokens": 4, "computed_tokens": 3, "resumable": True},
            "token_ids": [1, 2, 3, 4, 5],
        }
        [asked] = engine.resumed
        running = asked.state.running
        assert unpack_i32(running.request.input_ids).tolist() == [1, 2, 3, 4]
        assert (running.output, running.max_new_tokens, running.request.stop_ids) == (b"", 1, ())

    with_engine(run, **options)


@pytest.mark.parametrize(("written", "asked"), [("", "\0"), ("t", "\0t"), ("\0t", "\0t")])
def test_prefixes_that_are_kept_apart_by_key_stay_so(options, written, asked):
    async def run(engine: FakeEngine) -> None:
        request = msgspec.structs.replace(STATE.running.request, extra_key=written)
        state = msgspec.structs.replace(STATE, running=msgspec.structs.replace(STATE.running, request=request))
        knows(engine, state)
        await engine.post("/generate", {"text": "x", "rid": "done"})
        assert (await engine.post("/kv/snapshot", {"name": "s", "rid": "done"})).status_code == 200
        await engine.post("/kv/restore", {"name": "s"})
        assert engine.resumed[0].state.running.request.extra_key == asked

    with_engine(run, cache_by_key=True, **options)


def test_what_is_deleted_may_go_from_the_store(options):
    async def run(engine: FakeEngine) -> None:
        await saved(engine, "s")
        async with engine.http() as client:
            assert (await client.delete("/kv/sessions/s")).json() == {"deleted": "s"}
            assert (await client.delete("/kv/sessions/s")).status_code == 404
        [released] = [q for q in engine.questions if isinstance(q, ReleaseReq)]
        assert unpack_i32(released.token_ids).tolist() == [1, 2, 3, 4]

    with_engine(run, **options)


@pytest.mark.parametrize("quota", [2.0, 0.000005])
def test_what_is_replaced_or_has_no_room_may_go_but_for_what_both_have(options, quota):
    """The quota is full with the first one, or holds both."""

    async def run(engine: FakeEngine) -> None:
        await saved(engine, "s")
        request = make_generate("r", [1, 2, 3, 9, 9, 9], max_new_tokens=9)
        longer = RunningRequest(request, b"", 9, 0.0)
        engine.snapshot = SnapshotResult(msgspec.structs.replace(STATE, running=longer), "", 6, 6144)
        said = await engine.post("/kv/snapshot", {"name": "s", "rid": "done"})
        [released] = [q for q in engine.questions if isinstance(q, ReleaseReq)]
        gone = [1, 2, 3, 4] if said.status_code == 200 else [1, 2, 3, 9, 9, 9]
        assert (said.status_code, unpack_i32(released.token_ids).tolist()) == (200 if quota > 1 else 507, gone)
        assert released.shared == 3

    with_engine(run, kv_sessions_quota=quota, **options)


def test_in_the_words_of_llama_server(options):
    async def run(engine: FakeEngine) -> None:
        knows(engine)
        await engine.post("/generate", {"text": "x", "rid": "0"})
        saved = (await engine.post("/slots/0?action=save", {"filename": "chat.bin"})).json()
        assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "chat.bin", 5)
        assert saved["timings"]["save_ms"] >= 0
        back = (await engine.post("/slots/0?action=restore", {"filename": "chat.bin"})).json()
        assert (back["n_restored"], "restore_ms" in back["timings"]) == (4, True)
        assert (await engine.post("/slots/x?action=erase", {"filename": "chat.bin"})).json() == {
            "id_slot": "x",
            "n_erased": 5,
        }
        for path, body, status in (
            ("/slots/0?action=restore", {"filename": "chat.bin"}, 404),
            ("/slots/0", {"filename": "a"}, 400),
            ("/slots/0?action=steal", {"filename": "a"}, 400),
            ("/slots/0?action=restore", {"filename": "../../etc/passwd"}, 400),
            ("/slots/9?action=save", {"filename": "a"}, 404),
        ):
            assert (await engine.post(path, body)).status_code == status, path
        for slot in ("9" * 30, "9" * 5000, "\u0663"):  # none of these is a number that JSON or a client has
            await engine.post("/generate", {"text": "x", "rid": "0"})
            await engine.post("/slots/0?action=save", {"filename": "a"})
            for action in ("restore", "erase"):
                said = await engine.post(f"/slots/{slot}?action={action}", {"filename": "a"})
                assert (said.status_code, said.json()["id_slot"]) == (200, slot)

    with_engine(run, **options)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/kv/snapshot", {"rid": "r"}, "name: is required"),
        ("/kv/snapshot", {"name": "a"}, "exactly one of rid, text, input_ids, messages; found: none"),
        ("/kv/snapshot", {"name": "a", "rid": "r", "text": "x"}, "found: rid and text"),
        ("/kv/snapshot", {"name": "a", "rid": "r", "extra_key": "k"}, "extra_key: goes with a prompt"),
        ("/kv/snapshot", {"name": "a", "text": "x", "add_generation_prompt": True}, "goes with messages"),
        ("/kv/snapshot", {"name": "a", "text": "x", "sampling_params": {"n": 2}}, "a session is one answer"),
        ("/kv/snapshot", {"name": "a", "input_ids": []}, "input_ids: is empty"),
        ("/kv/snapshot", {"name": "a", "rid": "r", "ttl_s": 0}, "ttl_s"),
        ("/kv/snapshot", {"name": "../a", "text": "x"}, "name: has up to 128 letters"),
        ("/kv/restore", {"name": "a/b"}, "name: has up to"),
        ("/kv/restore", {"filename": "a"}, "name: is required"),
    ],
)
def test_what_is_refused_names_its_field(options, path, body, says):
    async def run(engine: FakeEngine) -> None:
        knows(engine)
        answer = await engine.post(path, body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
        assert not engine.requests

    with_engine(run, **options)


def test_a_snapshot_says_whose_request_it_has_to_be(keyed):
    """The engine may know another key's request by a name that is the caller's last one's."""

    async def run(engine: FakeEngine) -> None:
        for name in KEYS:
            await saved(engine, "s", authorization=KEYS[name])
        asked = [q.key_name for q in engine.questions if isinstance(q, SnapshotReq)]
        assert asked == ["alice", "bob", None]
        async with engine.http(authorization=KEYS["admin"]) as client:
            await client.post("/kv/restore", json={"name": "s", "owner": "bob", "resume": False})
        assert engine.resumed[-1].state.running.request.key_name == "bob"
        assert engine.resumed[-1].state.running.request.timeout_s == 0.0

    with_engine(run, **keyed)


@pytest.mark.parametrize("owner", ["a/../../elsewhere", "a%00b", "x" * 300, "(no one)", "a%0Ab"])
def test_an_owner_is_a_key_and_no_path(options, tmp_path, owner):
    # A folder of the first part of the path, and a file that is none of ours.
    (tmp_path / "sessions" / "key-a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "s.session"
    other.write_text("not ours")

    async def run(engine: FakeEngine) -> None:
        async with engine.http(authorization=f"Bearer {ADMIN_KEY}") as client:
            assert (await client.delete(f"/kv/sessions/s?owner={owner}")).status_code == 400
            body = {"name": "s", "owner": unquote(owner)}
            assert (await client.post("/kv/restore", json=body)).status_code in (400, 422)

    with_engine(run, **options)
    assert other.exists()


@pytest.mark.parametrize("slot", ["9" * 5000, "99999999999999999999", "\u0663", "a"])
def test_a_slot_that_is_no_small_number_is_a_name(options, slot):
    async def run(engine: FakeEngine) -> None:
        await saved(engine, "s")
        async with engine.http() as client:
            answer = await client.post(f"/slots/{slot}?action=erase", json={"filename": "s"})
        assert (answer.status_code, answer.json()["id_slot"]) == (200, slot)

    with_engine(run, **options)


def test_a_name_may_end_as_its_file_does(options):
    name = "x.session"

    async def run(engine: FakeEngine) -> None:
        await saved(engine, name)
        async with engine.http() as client:
            assert [s["name"] for s in (await client.get("/kv/sessions")).json()["sessions"]] == [name]
            assert (await client.delete(f"/kv/sessions/{name}")).json() == {"deleted": name}
            assert (await client.get("/kv/sessions")).json() == {"sessions": []}

    with_engine(run, **options)


def test_an_admin_sees_whose_a_damaged_one_is_and_can_delete_it(keyed, tmp_path):
    async def run(engine: FakeEngine) -> None:
        await saved(engine, "a", authorization=KEYS["alice"])
        (tmp_path / "sessions" / "key-alice" / "a.session").write_bytes(b"?")
        entry = {"name": "a", "bytes": 1, "damaged": True}
        async with engine.http(authorization=KEYS["alice"]) as client:
            assert (await client.get("/kv/sessions")).json()["sessions"] == [entry]
        async with engine.http(authorization=KEYS["admin"]) as client:
            assert (await client.get("/kv/sessions")).json()["sessions"] == [entry | {"owner": "alice"}]
            assert (await client.delete("/kv/sessions/a?owner=alice")).status_code == 200

    with_engine(run, **keyed)


def test_a_snapshot_while_the_model_loads_is_to_be_tried_again(options) -> None:
    async def check(engine: FakeEngine) -> None:
        engine.snapshot = RefusedAnswer(503, "the model is still loading")
        running = await run_one(engine, "r")
        answer = await engine.post("/kv/snapshot", {"name": "s", "rid": "r"})
        running.cancel()
        message = "the model is still loading; try again in a few seconds"
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, message)

    with_engine(check, hold=True, **options)
