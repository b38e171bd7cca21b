"""``--kv-debug``: equal KV hashes the same in every order, what changes is found, named and not found again."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.layouts import latent_layout
from support.scrape import metrics_of
from support.sim import SimInstance, SimWindow, make_generate, make_options, reference_output
from support.sim_pair import SimPair, SimSide, assert_all_returned, run_until_idle
from support.sim_tiers import TieredSim

from pdserve.mem_cache.base_prefix_cache import KVHold
from pdserve.mem_cache.kv_pages.page_order import PageConverter
from pdserve.mem_cache.page_hash import prompt_hashes
from pdserve.mem_cache.storage.frame import HEADER_BYTES, header
from pdserve.mem_cache.tree_node import make_root
from pdserve.messages.base import pack_i32
from pdserve.messages.handover import FirstToken, TransferDone
from pdserve.messages.kv_debug import HashPages, KVHashes, KVHashesReq, PagesHashed
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.sessions import ResumeReq, SessionState, SnapshotReq, SnapshotResult
from pdserve.messages.worker import KVGroup, KVLayout
from pdserve.model_runner.device.choice import open_device
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.page_hasher import PageHasher
from pdserve.model_runner.kv.pool import make_pool
from pdserve.model_runner.kv.pool_hasher import PoolHasher
from pdserve.model_runner.kv.pools import PoolPlan, Pools
from pdserve.scheduler import store_link
from pdserve.scheduler.features.kv_hashes import KVHashing
from pdserve.scheduler.handlers import Handlers
from pdserve.scheduler.kv_debug import MOST_LINES, KVDebug, Place
from pdserve.scheduler.req import Req, ReqState, Route


def prompt(seed: int, length: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def ask(sim: SimInstance, rid: str, tokens: list[int], count: int = 4) -> None:
    sim.submit(rid, tokens, max_new_tokens=count)
    if isinstance(sim, TieredSim):
        sim.settle()
    else:
        sim.run_until_idle()


def displace(sim: TieredSim) -> None:
    """Fill the pool with others."""
    for i in range(8):
        ask(sim, f"other-{i}", prompt(10 + i))


def debug_of(sim: SimInstance) -> KVDebug:
    debug = sim.scheduler.memory.debug
    assert isinstance(debug, KVDebug)
    return debug


def watched(**options) -> SimInstance:
    return SimInstance(make_options(kv_debug=True, **options))


# --- hashes ---


def in_blocks(layout: KVLayout, page: np.ndarray) -> tuple[KVLayout, np.ndarray]:
    """Return the layout and the page as the CPU engine has them."""
    blocks, page = msgspec.structs.replace(layout, order="blocks"), page.copy()
    PageConverter(blocks, "tokens").convert(page)
    return blocks, page


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
def test_a_page_hashes_the_same_in_either_order(dtype, page_size):
    layout = make_layout(KVShape(3, 2, 16), page_size, getattr(torch, dtype))
    page = np.random.default_rng(1).integers(0, 256, layout.page_bytes, dtype=np.uint8)
    blocks, there = in_blocks(layout, page)
    before = there.copy()
    hashed = PageHasher(layout, 0).hash(page)
    assert len(hashed) == 3 * 2 * 8
    assert PageHasher(blocks, 0).hash(there) == hashed
    assert np.array_equal(there, before)
    assert PageHasher(blocks, 0).is_canonical


def test_a_part_of_a_layer_changes_its_own_hash_alone():
    layout = make_layout(KVShape(4, 2, 16), 16, torch.int8)
    page = np.random.default_rng(2).integers(0, 256, layout.page_bytes, dtype=np.uint8)
    hashed = np.frombuffer(PageHasher(layout, 0).hash(page), dtype="<u8")
    blocks, there = in_blocks(layout, page)
    for layer in range(4):
        for part in (0, 1):
            changed = there.copy()
            at = (2 * layer + part) * (layout.page_bytes // 8)
            changed[at + 5] ^= 1  # an element; a head's scales are at its block's end
            differs = np.frombuffer(PageHasher(blocks, 0).hash(changed), dtype="<u8") != hashed
            assert differs.nonzero()[0].tolist() == [2 * layer + part]


def test_latent_rows_have_one_hash_a_layer_and_labels_one_of_their_own():
    layout = latent_layout(16, 2, 32, "bfloat16", 2 * 16 * 32 * 2)
    page = np.random.default_rng(3).integers(0, 256, layout.page_bytes, dtype=np.uint8)
    blocks, there = in_blocks(layout, page)
    assert len(PageHasher(layout, 0).hash(page)) == 2 * 8
    assert PageHasher(blocks, 0).hash(there) == PageHasher(layout, 0).hash(page)
    sparse = KVGroup((0, 1), "sparse", 2, 16, "bfloat16", 2 * 8 * 2 * (16 + 16 + 4) * 2, label_dim=4)
    assert sparse.parts == ("K", "V", "labels")
    assert sparse.part_bytes == (8 * 2 * 16 * 2, 8 * 2 * 16 * 2, 8 * 2 * 4 * 2)


def test_pages_of_one_order_only_hash_as_they_lie():
    layout = msgspec.structs.replace(make_layout(KVShape(1, 1, 16), 24, torch.bfloat16), order="blocks")
    hasher = PageHasher(layout, 0)
    assert not hasher.is_canonical
    assert len(hasher.hash(np.zeros(layout.page_bytes, dtype=np.uint8))) == 16


def test_pools_are_looked_at_where_they_lie():
    """In a buffer of the host's, and on a device, by copies; which is the host here."""
    layout = make_layout(KVShape(4, 2, 16), 16, torch.bfloat16, windows={1: 32, 3: 32})
    pools = [make_pool(layout, 4, torch.device("cpu"), group=group) for group in (0, 1)]
    held = [pool.data.view(4, -1).view(torch.uint8) for pool in pools]
    for i, pages in enumerate(held):
        pages.copy_(torch.randint(0, 256, pages.shape, generator=torch.Generator().manual_seed(i)))
    wanted = [
        b"".join(PageHasher(layout, group).hash(pages[page].numpy()) if page else bytes(32) for page in asked)
        for group, (pages, asked) in enumerate(zip(held, ((2, 1), (0, 3)), strict=True))
    ]
    on_device = Pools(layout, PoolPlan(4, 0, 4), pools, [None, None])
    regions = [SimpleNamespace(buffer=pages.numpy().data) for pages in held]
    on_host = dataclasses.replace(on_device, regions=regions)
    for lying in (on_device, on_host):
        hasher = PoolHasher(lying, open_device("cpu"))
        hashed = hasher.obey(HashPages(5, [pack_i32([2, 1]), pack_i32([0, 3])]))
        assert hashed == PagesHashed(5, wanted, "tokens")


# --- what is compared ---


def test_without_the_flag_nothing_is_compared():
    sim = SimInstance()
    ask(sim, "a", prompt(1))
    assert not sim.scheduler.memory.debug.enabled
    assert not any("kv_debug" in name for name in metrics_of(sim.scheduler).names())


def test_a_prefix_that_is_reused_is_what_was_computed():
    sim = watched()
    ask(sim, "a", prompt(1), 12)
    assert len(debug_of(sim)._table) == 12  # whole pages of prompt and output, but for the last token's
    ask(sim, "b", prompt(1) + reference_output(prompt(1), 8))
    assert debug_of(sim).compared == {Place.REUSE: 11, Place.PREFILL: 1}  # the last page is computed again
    assert not debug_of(sim).mismatches
    assert debug_of(sim).problem == ""


def test_kv_that_changed_in_the_pool_is_named_and_not_found_again(caplog):
    sim = watched()
    ask(sim, "a", prompt(1))
    [slot] = sim.scheduler.memory.pool.cache.match_prefix(np.array(prompt(1), dtype=np.int32)).slots[[13]]
    sim.worker.kv[slot] ^= 1 << 40  # token 13 is in page 3; the first half of a page stands for its keys here
    ask(sim, "b", prompt(1))
    assert debug_of(sim).mismatches == {Place.REUSE: 1}, debug_of(sim).info()
    [line] = [r for r in caplog.records if r.levelname == "ERROR"]
    assert line.rid == "b"
    assert "page 3 (tokens 12 to 15), layer 0, K: " in line.getMessage()
    assert "as it was found in the cache" in line.getMessage()
    assert "when it was computed" in line.getMessage()
    assert "1 hashes of KV that differ; the last request: b: page 3" in debug_of(sim).problem
    # The pages before it were compared as well, and are kept.
    assert sim.scheduler.memory.pool.cache.peek(np.array(prompt(1), dtype=np.int32)) == 12
    ask(sim, "c", prompt(1))
    assert sim.tokens["c"] == reference_output(prompt(1), 4)
    assert sum(debug_of(sim).mismatches.values()) == 1


def test_what_is_computed_again_otherwise_is_reported_and_no_fault_of_the_cache(caplog, monkeypatch):
    sim = watched(disable_radix_cache=True, chunked_prefill_size=64)
    ask(sim, "a", prompt(1))
    monkeypatch.setattr("support.sim.mix", lambda before, token: before + token + 1)
    ask(sim, "b", prompt(1))
    assert debug_of(sim).mismatches == {Place.PREFILL: 20}
    assert debug_of(sim).problem == ""
    assert {record.levelname for record in caplog.records if "KV differs" in record.getMessage()} == {"WARNING"}
    assert len(caplog.records) == MOST_LINES + 1
    ask(sim, "c", prompt(1))
    assert debug_of(sim).mismatches == {Place.PREFILL: 20}  # the newest counts


@pytest.mark.parametrize("window", [SimWindow(), SimWindow(8, 64)])
def test_what_comes_back_from_the_host_and_the_store_is_what_went(monkeypatch, window):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)
    sim = TieredSim(24, kv_debug=True, window=window)
    ask(sim, "a", prompt(1))
    displace(sim)
    ask(sim, "b", prompt(1))
    assert debug_of(sim).compared[Place.STORE] == 9
    assert debug_of(sim).compared[Place.HOST] == 0
    roomy = TieredSim(200, kv_debug=True, store=False, window=window)
    ask(roomy, "a", prompt(1))
    displace(roomy)
    ask(roomy, "b", prompt(1))
    assert debug_of(roomy).compared[Place.HOST] == 9
    assert not debug_of(sim).mismatches
    assert not debug_of(roomy).mismatches


def test_a_store_that_lies_under_a_right_checksum_is_found_out(monkeypatch, caplog):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)
    sim = TieredSim(24, kv_debug=True)
    ask(sim, "a", prompt(1))
    displace(sim)
    name = prompt_hashes(sim.tiers.seed(), np.array(prompt(1), dtype=np.int32), 4, "")[2]
    page = bytearray(sim.store.kept[name][HEADER_BYTES:])
    page[-1] ^= 1
    sim.store.kept[name] = header(name, memoryview(page)) + bytes(page)
    ask(sim, "b", prompt(1))
    assert debug_of(sim).mismatches == {Place.STORE: 1}
    assert "page 2 (tokens 8 to 11), layer 0, V: " in caplog.text
    assert "back from the store" in caplog.text
    assert name not in sim.store.kept


def test_rounded_pages_are_taken_as_they_come():
    sim = TieredSim(200, kv_debug=True, store=False)
    debug_of(sim)._is_lossy = True
    ask(sim, "a", prompt(1))
    displace(sim)
    ask(sim, "b", prompt(1))
    assert debug_of(sim).compared[Place.HOST] == 0
    ask(sim, "c", prompt(1))
    assert debug_of(sim).compared[Place.REUSE] == 9


def test_memory_that_is_looked_at_is_offered_to_no_peer():
    sim = watched()
    sim.submit("a", prompt(1, 8), max_new_tokens=1)
    sim.plan()
    sim.work()  # the step; what was asked behind it is not answered
    memory = sim.scheduler.memory
    fence = memory.pinned.fence()
    assert not memory.pinned.is_past(fence, sim.scheduler.completed_step)
    sim.run_until_idle()
    assert memory.pinned.is_past(fence, sim.scheduler.completed_step)


def test_the_table_is_bounded():
    sim = watched()
    debug_of(sim)._most = 6
    ask(sim, "a", prompt(1))
    assert len(debug_of(sim)._table) == 6
    ask(sim, "b", prompt(1))
    assert not debug_of(sim).mismatches


# --- what is handed over ---


def handed_over(pair: SimPair, rid: str = "a", tokens: list[int] | None = None, room: int = 1) -> SimPair:
    pair.submit(rid, tokens or prompt(1), room=room, max_new_tokens=6)
    run_until_idle(pair)
    assert pair.decode.tokens[rid] == reference_output(tokens or prompt(1), 6)
    return pair


@pytest.mark.parametrize("window", [SimWindow(), SimWindow(8, 64)])
def test_what_lands_is_what_was_computed(window):
    pair = handed_over(SimPair(kv_debug=True, window=window))
    assert debug_of(pair.decode).compared == {Place.TRANSFER: 10}
    assert not debug_of(pair.decode).mismatches
    assert debug_of(pair.prefill).compared == {}
    longer = prompt(1) + reference_output(prompt(1), 6) + prompt(2, 7)  # 53 tokens; the decode has 44 of them
    handed_over(pair, "b", longer, room=2)
    assert debug_of(pair.decode).compared == {Place.TRANSFER: 12, Place.REUSE: 11}
    assert not debug_of(pair.decode).mismatches


def test_the_sender_waits_for_its_own_hashes():
    pair = SimPair(kv_debug=True)
    pair.submit("a", prompt(1, 4), room=1, legs=("decode",), max_new_tokens=6)
    while not pair.prefill.senders.rooms or pair.prefill.senders.rooms[1].transfer_request is None:
        pair.decode.plan()
        pair.advance()
        while pair.to_prefill:
            pair.deliver_to_prefill()
    pair.submit("a", prompt(1, 4), room=1, legs=("prefill",), max_new_tokens=6)
    pair.decode.transfer()
    pair.prefill.plan()
    pair.prefill.work()  # the step; its pages are to be looked at next
    for handover in list(pair.pushes):
        pair.copy(handover)
    assert [type(message) for message in pair.to_decode] == [FirstToken]
    pair.prefill.work()
    pair.collect()
    assert [type(message) for message in pair.to_decode] == [FirstToken, TransferDone]
    run_until_idle(pair)
    assert debug_of(pair.decode).compared == {Place.TRANSFER: 1}


def test_a_page_that_a_transfer_has_changed_is_not_used(caplog):
    pair = SimPair(kv_debug=True, disable_handover_checksum=True)
    pair.corrupt = True
    handed_over(pair)
    assert pair.decode.receivers.recomputed == 1
    assert debug_of(pair.decode).mismatches == {Place.TRANSFER: 20}
    assert "as it arrived" in caplog.text
    assert "at the instance that computed it" in caplog.text
    assert {r.rid for r in caplog.records if "KV differs" in r.getMessage()} == {"a"}
    assert debug_of(pair.decode).problem
    assert_all_returned(pair)


def test_without_the_flag_damage_is_taken_for_what_was_sent():
    """Nothing else finds what the test above damages."""
    pair = SimPair(disable_handover_checksum=True)
    pair.corrupt = True
    pair.submit("a", prompt(1), room=1, max_new_tokens=6)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] != reference_output(prompt(1), 6)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_peer_without_the_flag_goes_on_working(who, monkeypatch):
    make = SimSide.__init__
    monkeypatch.setattr(
        SimSide, "__init__", lambda self, pair, mode, window, **o: make(self, pair, mode, window, kv_debug=mode == who)
    )
    pair = handed_over(SimPair())
    debug = debug_of(getattr(pair, who))
    assert debug.compared == {}
    assert len(debug._table) >= 10  # each knows what it has, for what comes later


def test_hashes_that_are_no_answer_to_what_was_asked_are_none():
    sim = watched()
    ask(sim, "a", prompt(1))
    debug = debug_of(sim)
    req = Req.create(make_generate("x", prompt(1)), Route.INCOMING, ReqState.TRANSFERRING, 1, 1)
    reported: list[str] = []
    row = debug.hashes_of(req, 0, 1)
    for theirs in (b"", row, row + row[:5], row * 2 + b"1", row * 3, bytes(len(row) * 2)):
        hold = KVHold(0, "", make_root(), 0, 0)
        debug.landed(
            req, hold, 0, np.array([1, 2], dtype=np.int32), theirs, lambda problem, now: reported.append(problem)
        )
        sim.outbox.flush()
        sim.work()
        assert hold.hashed == 8
    assert reported == [""] * 6
    assert Place.TRANSFER not in debug.compared


# --- sessions ---


def snapshot(sim: TieredSim, rid: str) -> SessionState:
    sim.tell(SnapshotReq(rid, True, 1e10, id=7))
    while not sim.answers:
        sim.plan()
        sim.work()
        sim.serve_store()
    assert rid in sim.scheduler.reqs  # it runs on
    [said] = [a for a in sim.answers if isinstance(a, SnapshotResult)]
    return said.state


def resume(sim: TieredSim, state: SessionState, rid: str) -> None:
    request = msgspec.structs.replace(state.running.request, rid=rid, arrival=sim.now)
    running = msgspec.structs.replace(state.running, request=request)
    sim.tell(ResumeReq(msgspec.structs.replace(state, running=running)))
    sim.settle()


def midway() -> tuple[TieredSim, SessionState]:
    """Make an instance and the snapshot of a request after some tokens."""
    sim = TieredSim(200, kv_debug=True)
    sim.submit("a", prompt(1), max_new_tokens=40)
    while len(sim.tokens.get("a", [])) < 13:
        sim.plan()
        sim.work()
        sim.serve_store()  # or the prompt waits seconds for what it was asked
    return sim, snapshot(sim, "a")


def test_a_session_that_goes_on_elsewhere_finds_what_was_computed(monkeypatch, caplog):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)
    sim, state = midway()
    reported = [any(state.kv_hashes[at : at + 16]) for at in range(0, len(state.kv_hashes), 16)]
    assert reported == [True] * 13  # 40 tokens of prompt and 13 of output, but for the last
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SessionState) == state
    other = TieredSim(200, kv_debug=True, kept=dict(sim.store.kept))
    resume(other, state, "b")
    assert other.tokens["b"] == reference_output(prompt(1), 40)
    assert debug_of(other).compared == {Place.RESTORE: 13}
    assert not debug_of(other).mismatches

    [name] = prompt_hashes(state.kv_seed, np.array(prompt(1), dtype=np.int32), 4, "")[5:6]
    page = bytearray(sim.store.kept[name][HEADER_BYTES:])
    page[0] ^= 1
    lying = {**sim.store.kept, name: header(name, memoryview(page)) + bytes(page)}
    third = TieredSim(200, kv_debug=True, kept=lying)
    resume(third, state, "c")
    assert debug_of(third).mismatches == {Place.RESTORE: 1}
    assert "page 5 (tokens 20 to 23), layer 0, K: " in caplog.text
    assert "as its session was restored" in caplog.text
    assert "when its session was saved" in caplog.text


def test_a_session_without_hashes_and_one_of_another_layout_compare_nothing(monkeypatch):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)
    sim, state = midway()
    plain = msgspec.structs.replace(state, kv_hashes=b"")
    assert b"kv_hashes" not in msgspec.msgpack.encode(plain)
    for changed in (plain, msgspec.structs.replace(state, kv_seed=bytes(16))):
        other = TieredSim(200, kv_debug=True, kept=dict(sim.store.kept))
        resume(other, changed, "b")
        assert debug_of(other).compared[Place.RESTORE] == 0
    without = TieredSim(200, kept=dict(sim.store.kept))
    resume(without, state, "c")
    assert without.tokens["c"] == reference_output(prompt(1), 40)


# --- what an engineer asks ---


def cached_hashes(sim: SimInstance, tokens: list[int], extra_key: str | None = None) -> Any:
    scheduler = sim.scheduler
    ask = KVHashesReq(pack_i32(tokens), extra_key, id=9)
    hashing = KVHashing(scheduler.memory, scheduler.worker.layout, sim.outbox)
    Handlers(sim.outbox, hashing).handle(ask, sim.now)
    sim.outbox.flush()
    sim.run_until_idle()
    sim._read()
    [answer] = [a for a in sim.answers if isinstance(a, KVHashes | RefusedAnswer)]
    sim.answers.clear()
    return answer


def test_what_the_cache_holds_is_reported_and_is_the_same_on_two_instances():
    one, other = watched(), watched()
    for sim in (one, other):
        ask(sim, "x" if sim is one else "y", prompt(5))  # so that pages have other numbers
        ask(sim, "a", prompt(1))
    a, b = cached_hashes(one, prompt(1)), cached_hashes(other, [*prompt(1), 1, 2])
    assert (type(a), a.cached_tokens, a.page_size, a.extra_key, a.order) == (KVHashes, 40, 4, "", "tokens")
    assert len(a.groups[0].hashes) == 10 * 2 * 8
    assert a == b
    [slot] = other.scheduler.memory.pool.cache.match_prefix(np.array(prompt(1), dtype=np.int32)).slots[[13]]
    other.worker.kv[slot] ^= 1
    changed = cached_hashes(other, prompt(1))
    differs = np.frombuffer(changed.groups[0].hashes, "<u8") != np.frombuffer(a.groups[0].hashes, "<u8")
    assert differs.nonzero()[0].tolist() == [2 * 3]  # page 3, keys
    assert cached_hashes(one, prompt(99)).cached_tokens == 0


def test_the_namespace_is_found_that_has_most_of_it():
    sim = watched()
    request = msgspec.structs.replace(make_generate("a", prompt(1), max_new_tokens=2), extra_key="tenant")
    sim.scheduler.arrivals.admit(request, sim.now)
    sim.run_until_idle()
    found = cached_hashes(sim, prompt(1))
    assert (found.cached_tokens, found.extra_key) == (40, "tenant")
    assert cached_hashes(sim, prompt(1), "another").cached_tokens == 0
    assert cached_hashes(SimInstance(), prompt(1)).status == 501


def test_a_question_of_any_length_looks_at_little(monkeypatch):
    sim = watched()
    for i in range(20):
        request = msgspec.structs.replace(make_generate(f"r{i}", prompt(i), max_new_tokens=1), extra_key=f"tenant-{i}")
        sim.scheduler.arrivals.admit(request, sim.now)
        sim.run_until_idle()
    memory, looked = sim.scheduler.memory, []
    cached_len = memory.pool.cached_len
    monkeypatch.setattr(memory.pool, "cached_len", lambda toks, key: looked.append(len(toks)) or cached_len(toks, key))
    found = cached_hashes(sim, [*prompt(19), *range(100_000)])
    assert (found.cached_tokens, found.extra_key) == (40, "tenant-19")
    assert 0 < sum(looked) <= 21 * memory.pool.page_size + memory.pool.max_total_tokens
