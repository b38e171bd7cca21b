"""Sessions through real processes: written down, killed, started anew or elsewhere, and the same tokens."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from support.machine import limit
from support.processes import ONE_THREAD, Launched, launched, pd_pair, wait_until
from support.redis_server import SERVER, redis_server

PROMPT = [(7 * i) % 90 + 3 for i in range(400)]
CONTEXT = [5, *PROMPT[1:]]
"""Prompt of a session without an answer. It shares no page with the others."""
GREEDY = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
SEEDED = {
    **{"max_new_tokens": 300, "temperature": 0.9, "top_p": 0.95, "sampling_seed": 11, "ignore_eos": True},
    **{"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
}
LISTS = {"type": "array", "minItems": 400, "items": {"type": "integer", "minimum": 0, "maximum": 99}}
MATCHED = {"max_new_tokens": 300, "temperature": 1.0, "sampling_seed": 5, "json_schema": LISTS}
"""An answer that its grammar does not let end before the limit."""
SCORED = {"return_logprob": True, "logprob_start_len": 390}


def args(tiny_args: list[str], folder: Path, *, store: bool = True) -> list[str]:
    """Return the flags of an instance with sessions and store in ``folder``."""
    tier = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"]
    tier += ["--hicache-storage-url", str(folder / "kv")]
    sessions = ["--kv-sessions-dir", str(folder / "sessions")]
    return [*ONE_THREAD, *tiny_args, "--max-total-tokens", "4096", *sessions, *(tier if store else [])]


def snapshot_midway(server: Launched, name: str, sampling: dict, after: int = 40, **body) -> dict:
    """Begin an answer, snapshot it in the middle, and leave."""
    asked = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, "rid": f"run-{name}", **body}
    with server.client.stream("POST", server.url + "/generate", json=asked) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(after):
            next(lines)
        with httpx.Client(timeout=limit(60), trust_env=False) as other:
            said = other.post(server.url + "/kv/snapshot", json={"name": name, "rid": f"run-{name}"})
    assert said.status_code == 200, said.text
    return said.json()


def reusable(said: dict) -> int:
    """Return how many tokens of a snapshot need not be computed again. Its last token has to be, for the logits."""
    known = said["prompt_tokens"] + said["output_tokens"]
    return min(said["kv_tokens"], (known - 1) // 16 * 16)


def restored(server: Launched, name: str, **body) -> dict:
    response = server.post("/kv/restore", {"name": name, **body})
    assert response.status_code == 200, response.text
    return response.json()


class Written(NamedTuple):
    """What an instance wrote down before it was killed."""

    flags: list[str]
    saved: dict[str, dict]
    """Answers of ``/kv/snapshot``, by the session's name."""
    slot: dict
    copy: Path
    """A second copy of the folder, for a test that damages it."""


@pytest.fixture(scope="module")
def written(tmp_path_factory, tiny_args) -> Written:
    folder = tmp_path_factory.mktemp("written")
    (folder / "data").mkdir()
    flags = [*args(tiny_args, folder / "data"), "--kv-debug"]
    with launched(folder, "first", "server", *flags) as first:
        first.wait_healthy()
        saved = {
            "greedy": snapshot_midway(first, "greedy", GREEDY),
            "seeded": snapshot_midway(first, "seeded", SEEDED, **SCORED),
            "matched": snapshot_midway(first, "matched", MATCHED),
        }
        context = {"name": "context", "input_ids": CONTEXT, "sampling_params": GREEDY}
        chat = {"name": "chat", "messages": [{"role": "user", "content": "tell me " * 200}]}
        for asked in (context, chat):
            saved[asked["name"]] = first.post("/kv/snapshot", asked).raise_for_status().json()
        # In the words of llama-server: what has ended, by its rid.
        first.generate(input_ids=PROMPT[::-1], sampling_params={**GREEDY, "max_new_tokens": 20}, rid="3")
        slot = first.post("/slots/3?action=save", {"filename": "slot.bin"}).json()
        first.stop(signal.SIGKILL)
    shutil.copytree(folder / "data", folder / "copy")
    return Written(flags, saved, slot, folder / "copy")


class Lives(NamedTuple):
    """Two instances that know what was written, and what each listed at first."""

    again: Launched
    other: Launched
    listed: list[dict[str, int]]
    """Tokens with KV, by the session's name."""


@pytest.fixture(scope="module")
def lives(written, tmp_path_factory) -> Iterator[Lives]:
    tmp = tmp_path_factory.mktemp("lives")
    with (
        launched(tmp, "again", "server", *written.flags) as again,
        launched(tmp, "other", "server", *written.flags) as other,
    ):
        listed = []
        for server in (again, other):
            server.wait_healthy()
            sessions = server.client.get(server.url + "/kv/sessions").json()["sessions"]
            listed.append({s["name"]: s["kv_tokens"] for s in sessions})
        yield Lives(again, other, listed)


def test_an_answer_goes_on_after_a_kill_and_at_another_instance(written, lives, alone):
    again, other, saved = lives.again, lives.other, written.saved
    for name in ("greedy", "seeded", "matched"):
        said = saved[name]
        known = said["prompt_tokens"] + said["output_tokens"]
        assert said["kv"] == "stored"
        assert said["prompt_tokens"] == 400
        # The step that computes the KV of the last token may be under way already.
        assert said["kv_tokens"] in ((known - 1) // 16 * 16, known // 16 * 16)
        assert 40 <= said["output_tokens"] < 300
    for listed in lives.listed:
        assert listed.keys() == saved.keys() | {"slot.bin"}
        assert {name: listed[name] for name in saved} == {name: said["kv_tokens"] for name, said in saved.items()}
    found = {name: restored(other, name) for name in ("greedy", "seeded", "matched")}
    assert restored(again, "greedy")["output_ids"] == found["greedy"]["output_ids"]
    assert found["greedy"]["meta_info"]["cached_tokens"] == reusable(saved["greedy"])
    # The second one finds the prompt of the first; what little is left of its own is computed sooner than fetched.
    assert found["seeded"]["meta_info"]["cached_tokens"] >= 400
    looked = [server.info()["kv_debug"] for server in (again, other)]
    assert all(seen["compared_pages"]["restore"] >= 25 and not any(seen["mismatches"].values()) for seen in looked)
    streamed = other.post("/kv/restore", {"name": "greedy", "stream": True, "incremental": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert other.client.delete(other.url + "/kv/sessions/greedy").status_code == 200
    assert again.post("/kv/restore", {"name": "greedy"}).status_code == 404
    for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED), ("matched", MATCHED)):
        whole = alone.generate(input_ids=PROMPT, sampling_params=sampling, **(SCORED if name == "seeded" else {}))
        assert found[name]["output_ids"] == whole["output_ids"], name
        assert found[name]["text"] == whole["text"]
        for field in ("output_token_logprobs", "input_token_logprobs"):
            assert found[name]["meta_info"].get(field) == whole["meta_info"].get(field)
    assert alone.post("/kv/restore", {"name": "x"}).status_code == 501


def goes_on_elsewhere(tmp_path: Path, flags: list[str], unified: list[str]) -> None:
    """Take snapshots at one instance, kill it, and restore them at another.

    The answers must be those of an undisturbed request, from KV that came from the store.
    """
    with launched(tmp_path, "first", "server", *flags) as first:
        first.wait_healthy()
        said = {
            "greedy": snapshot_midway(first, "greedy", GREEDY),
            "seeded": snapshot_midway(first, "seeded", SEEDED),
        }
        assert {s["kv"] for s in said.values()} == {"stored"}
        first.stop(signal.SIGKILL)
    with launched(tmp_path, "other", "server", *flags) as other:
        other.wait_healthy()
        found = {name: restored(other, name) for name in said}
        details = found["greedy"]["meta_info"]["cached_tokens_details"]
        assert details == {"device": 0, "host": 0, "storage": reusable(said["greedy"])}
        assert found["seeded"]["meta_info"]["cached_tokens"] >= 400  # the prompt is also the other's
        wait_until(lambda: other.info()["invariants"] == "ok", 15, "checked")
    with launched(tmp_path, "plain", "server", *unified) as plain:
        plain.wait_healthy()
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            whole = plain.generate(input_ids=PROMPT, sampling_params=sampling)
            assert found[name]["output_ids"] == whole["output_ids"], name


@pytest.mark.slow
@pytest.mark.skipif(SERVER is None, reason="redis-server is not installed (Debian: redis-server)")
def test_an_answer_goes_on_elsewhere_with_its_kv_in_redis(tmp_path, tiny_args):
    plain = [*ONE_THREAD, *tiny_args, "--max-total-tokens", "4096"]
    with redis_server(tmp_path) as url:
        tier = ["--enable-hierarchical-cache", "--hicache-storage-backend", "redis", "--hicache-storage-url", url]
        goes_on_elsewhere(tmp_path, [*plain, *tier, "--kv-sessions-dir", str(tmp_path / "sessions")], plain)


@pytest.mark.slow
def test_an_answer_of_two_ranks_goes_on_elsewhere(tmp_path, tiny_args):
    plain = [*ONE_THREAD, *tiny_args, "--max-total-tokens", "4096"]
    ranks = args(tiny_args, tmp_path)[len(ONE_THREAD) :]
    goes_on_elsewhere(tmp_path, [*ranks, "--threads", "2", "--tp-size", "2"], plain)


def computed_anew(tmp_path: Path, name: str, flags: list[str], session: str) -> list[int]:
    """Return the output of a restored session of which nothing was cached."""
    with launched(tmp_path, name, "server", *flags) as server:
        server.wait_healthy()
        found = restored(server, session)
        assert found["meta_info"]["cached_tokens"] == 0, name
        return found["output_ids"]


# test_store_faults.py damages pages in every way.
@pytest.mark.slow
def test_with_a_damaged_store_it_is_computed(written, tmp_path, tiny_args, alone):
    pages = list((written.copy / "kv").rglob("*.page"))
    assert pages
    for path in pages:
        framed = bytearray(path.read_bytes())
        framed[-1] ^= 1
        path.write_bytes(framed)
    intact = alone.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    assert computed_anew(tmp_path, "damaged", args(tiny_args, written.copy), "greedy") == intact


@pytest.mark.slow
def test_without_a_store_or_with_other_pages_it_is_computed_and_by_another_model_refused(tmp_path, tiny_args):
    flags = args(tiny_args, tmp_path)
    with launched(tmp_path, "first", "server", *flags) as first:
        first.wait_healthy()
        snapshot_midway(first, "a", GREEDY)
        intact = restored(first, "a")["output_ids"]
    without = args(tiny_args, tmp_path, store=False)
    for name, given in (("without", without), ("pages", [*flags, "--page-size", "32"])):
        assert computed_anew(tmp_path, name, given, "a") == intact
    with launched(tmp_path, "bf16", "server", *[w.replace("float32", "bfloat16") for w in flags]) as foreign:
        foreign.wait_healthy()
        refused = foreign.post("/kv/restore", {"name": "a"})
        assert refused.status_code == 409
        assert "another model's" in refused.json()["error"]["message"]


def test_a_prompt_is_computed_once_and_for_all(written, lives):
    assert written.saved["context"]["kv_tokens"] == 400
    assert written.saved["chat"]["kv"] == "stored"
    assert (written.slot["id_slot"], written.slot["n_saved"]) == (3, 420)
    again = lives.again
    assert restored(again, "context")["cached_tokens"] == 384
    follow_up = again.generate(input_ids=[*CONTEXT, 5, 6], sampling_params={**GREEDY, "max_new_tokens": 4})
    assert follow_up["meta_info"]["cached_tokens"] == 384
    back = again.post("/slots/0?action=restore", {"filename": "slot.bin"}).json()
    assert (back["n_restored"], back["n_read"] > 0) == (416, True)
    answer = restored(again, "context", resume=True)
    assert answer["output_ids"] == again.generate(input_ids=CONTEXT, sampling_params=GREEDY)["output_ids"]
    assert again.post("/slots/0?action=erase", {"filename": "slot.bin"}).json()["n_erased"] == 420
    wait_until(lambda: again.info()["invariants"] == "ok", 15, "checked")


@pytest.mark.slow
def test_over_a_pair(tmp_path, tiny_args):
    with pd_pair(tmp_path, "tcp", *args(tiny_args, tmp_path)[len(ONE_THREAD) :]) as pair:
        said = snapshot_midway(pair.router, "a", GREEDY)
        assert said["kv"] == "stored"
        found = restored(pair.router, "a")
        assert len(found["output_ids"]) == 300
        whole = pair.router.generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert found["output_ids"] == whole["output_ids"]
