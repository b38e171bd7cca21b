"""What followers of the prefix cache are told, over real sockets: what they build is what the tree holds."""

from __future__ import annotations

import json
import random
from http.client import HTTPConnection

import msgspec
import numpy as np
import pytest
import zmq
from support.machine import limit
from support.radix_nodes import findable
from support.sim import SimInstance, make_options

from pdserve.mem_cache.allocator import PagedTokenToKVPoolAllocator
from pdserve.mem_cache.kv_events import KVEventLog
from pdserve.mem_cache.options import KVEventOptions
from pdserve.mem_cache.page_hash import prompt_hashes
from pdserve.mem_cache.radix_cache import RadixCache
from pdserve.mem_cache.req_to_token_pool import ReqToTokenPool
from pdserve.messages.kv_events import END, Follower, Frame, KVEventBatch, encode_batch, pack_seq, unpack_seq
from pdserve.runtime.web.ports import free_ports
from pdserve.scheduler.features.kv_event_feed import KVEventFeed
from pdserve.server.options import ServerOptions
from tools.step_overhead.fake_instance import fake_instance

PAGE, SEED = 2, b"model"
ANY = "tcp://127.0.0.1:*"


def in_tree(cache):
    """Hash, parent and tokens of each page that can be found, worked out from the nodes alone."""
    root = cache.match_prefix(np.empty(0, dtype=np.int32)).node
    paths, found = {root: ("", ())}, {}
    for node, edge, child in findable(cache, root):
        namespace, before = paths[node]
        namespace = edge[: -4 * PAGE].decode() if node is root else namespace
        tokens = before + tuple(np.frombuffer(child.key, dtype=np.int32).tolist())
        paths[child] = namespace, tokens
        hashes = prompt_hashes(SEED, np.array(tokens, dtype=np.int32), PAGE, namespace)
        for i in range(len(before) // PAGE, len(hashes)):
            found[hashes[i]] = hashes[i - 1] if i else None, tokens[i * PAGE : (i + 1) * PAGE]
    return found


class Rig:
    """A tree that is told what to do, and a subscriber of its feed."""

    def __init__(self, context, **fields):
        self.allocator = PagedTokenToKVPoolAllocator(40 * PAGE, PAGE)
        self.table = ReqToTokenPool(4, 64)
        self.log = KVEventLog(SEED, PAGE)
        self.cache = RadixCache(self.allocator, self.table, watchers=[self.log])
        options = ServerOptions(
            kv_events_endpoint=ANY, kv_events_replay_endpoint=ANY, kv_events_topic="kv", page_size=PAGE, **fields
        )
        self.feed = KVEventFeed(context, options, self.log, ANY)
        published, replay = self.feed.addresses
        self.sub, self.asks = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket, address in ((self.sub, published), (self.asks, replay)):
            socket.rcvtimeo, socket.linger = 5000, 0
            socket.connect(address)
        self.sub.subscribe(b"kv")
        self.holds = []
        self.rng = random.Random(3)

    def close(self):
        for socket in (self.sub, self.asks):
            socket.close()
        self.feed.close()

    def settle(self):
        """Publish until something comes, so that the subscription has arrived. Return the newest sequence number."""
        while not self.sub.poll(20):
            self.log.cleared()
            self.feed.tick(0.0)
        while self.sub.poll(50):
            newest = self.next()
        return newest.seq

    def next(self):
        topic, seq, payload = self.sub.recv_multipart()
        assert topic == b"kv"
        return Frame(unpack_seq(seq), payload)

    def replay(self, first):
        self.asks.send_multipart([b"", pack_seq(first)])
        frames = []
        while True:
            while not self.asks.poll(0):
                self.feed.tick(0.0)
            _, seq, payload = self.asks.recv_multipart()
            if unpack_seq(seq) == END:
                return frames
            frames.append(Frame(unpack_seq(seq), payload))

    def prompt(self):
        return np.array([0] * self.rng.randrange(0, 12) + self.rng.choices(range(3), k=6), dtype=np.int32)

    def step(self):
        """Do something that a scheduler does, and return its name."""
        what = self.rng.choice(["put", "put", "put", "match", "hold", "let_go", "evict", "condemn", "reset", "resize"])
        if what == "reset" and self.rng.random() < 0.6:
            what = "put"
        tokens, key = self.prompt(), self.rng.choice(["", "tenant"])
        if what == "put":
            tokens = tokens[: len(tokens) // PAGE * PAGE]
            if self.allocator.available_size() < len(tokens):
                self.cache.evict(len(tokens))
            slots = self.allocator.alloc_extend(0, len(tokens), 0)
            if slots is not None:
                self.allocator.free(slots[: self.cache.insert(tokens, slots, key)])
        elif what == "match":
            self.cache.match_prefix(tokens, key)
        elif what == "hold" and self.table.available_size():
            self.holds.append(self.cache.hold(self.table.alloc(), self.cache.match_prefix(tokens, key), key))
        elif what == "let_go" and self.holds:
            self.cache.release_req(self.holds.pop())
        elif what == "evict":
            self.cache.evict(self.rng.randrange(1, 9))
        elif what == "condemn":
            self.cache.condemn(tokens, key)
        elif what == "resize":
            self.allocator.resize(self.rng.randrange(10, 41))
            self.cache.withdraw()
        elif what == "reset":
            self.cache.reset()
        return what


@pytest.fixture
def make_rig():
    rigs = []
    with zmq.Context() as context:

        def make(**fields):
            rigs.append(Rig(context, **fields))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.close()


@pytest.fixture
def rig(make_rig):
    return make_rig()


def test_what_a_follower_builds_is_the_tree(rig):
    follower = Follower()
    follower.start_at(rig.settle() + 1)
    seen = set()
    for _ in range(400):
        seen.add(rig.step())
        before = follower.next_seq
        rig.feed.tick(0.0)
        if rig.feed.newest_seq >= before:
            assert follower.take(rig.next())
        assert follower.pages == in_tree(rig.cache)
        rig.cache.check_invariants(rig.holds)
    assert len(seen) == 8


def test_who_missed_something_has_it_replayed(rig):
    first = rig.settle() + 1
    follower = Follower()
    follower.start_at(first)
    for _ in range(60):
        rig.step()
        rig.feed.tick(0.0)
    assert not follower.take(Frame(first + 5, b""))
    assert follower.missing == first
    for frame in rig.replay(first):
        assert follower.take(frame)
    assert follower.missing is None
    assert follower.pages == in_tree(rig.cache)
    late = rig.replay(follower.next_seq - 3)
    assert [frame.seq for frame in late] == list(range(follower.next_seq - 3, follower.next_seq))
    assert not any(follower.take(frame) for frame in late)


def test_what_is_too_old_is_gone_and_strangers_are_answered_nothing(make_rig):
    rig = make_rig(kv_events_buffer=4)
    for _ in range(9):
        rig.log.cleared()
        rig.feed.tick(0.0)
    for junk in ([b""], [b"", b"12"], [b"", pack_seq(0), b"more"], [b"x" * 60]):
        rig.asks.send_multipart(junk)
    assert [frame.seq for frame in rig.replay(2)] == [5, 6, 7, 8]
    with pytest.raises(msgspec.MsgspecError):
        Follower().take(Frame(0, b"\x01"))


def test_replays_are_served_in_turn_a_few_batches_at_a_time(make_rig):
    rig = make_rig()
    for _ in range(500):
        rig.log.cleared()
        rig.feed.tick(0.0)
    second = make_rig()
    other = second.asks
    other.disconnect(second.feed.addresses[1])
    other.connect(rig.feed.addresses[1])
    for socket in (rig.asks, other):
        socket.send_multipart([b"", pack_seq(0)])
    seqs, turns = {rig.asks: [], other: []}, 0
    while not all(got and got[-1] == END for got in seqs.values()):
        rig.feed.tick(0.0)
        turns += rig.feed.seconds_left(0.0) == 0
        for socket, got in seqs.items():
            while socket.poll(0):
                got.append(unpack_seq(socket.recv_multipart()[1]))
    assert list(seqs.values()) == [[*range(500), END]] * 2
    # Some were left after as many turns as it takes to send 64 batches each time, but for the last.
    assert turns >= 500 // 64


def test_a_scheduler_tells_what_requests_leave():
    sim = SimInstance(make_options(page_size=PAGE, max_total_tokens=64, kv_events_endpoint=ANY))
    follower, log = Follower(), sim.scheduler.kv_events
    rng = random.Random(0)
    for i in range(60):
        sim.submit(f"r{i}", [1, 2, 3, 4] * rng.randrange(1, 4) + [5 + rng.randrange(9), 6, 7], max_new_tokens=3)
        if i % 3 == 0:
            sim.run_until_idle()
        if events := log.take():
            follower.take(Frame(follower.next_seq, encode_batch(KVEventBatch(0.0, events))))
    sim.run_until_idle()
    follower.take(Frame(follower.next_seq, encode_batch(KVEventBatch(0.0, log.take()))))
    cached = sim.scheduler.memory.pool.usage()["cached"]
    assert 0 < cached == len(follower.pages) * PAGE
    sim.scheduler.memory.flush()
    follower.take(Frame(follower.next_seq, encode_batch(KVEventBatch(0.0, log.take()))))
    assert not follower.pages


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_events_endpoint": "127.0.0.1:5557"}, "write it like tcp"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:port"}, "write it like tcp"),
        ({"kv_events_replay_endpoint": "tcp://127.0.0.1:1"}, "add --kv-events-endpoint"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:1", "disable_radix_cache": True}, "drop one"),
        ({"kv_events_buffer": 0}, "--kv-events-buffer"),
    ],
)
def test_options_that_cant_work_are_refused_by_name(fields, named):
    assert any(named in line for line in KVEventOptions.problems(ServerOptions(**fields)))
    assert not list(KVEventOptions.problems(ServerOptions(kv_events_endpoint="tcp://127.0.0.1:5557")))


def test_an_instance_tells_what_a_request_left_and_replays_it():
    """Through its processes, the model's excepted."""
    http, published, replay = free_ports(3)
    options = ServerOptions(
        port=http,
        kv_events_endpoint=f"tcp://127.0.0.1:{published}",
        kv_events_replay_endpoint=f"tcp://127.0.0.1:{replay}",
        log_level="error",
    )
    prompt = [9, 8, 7, 6] * 16
    with fake_instance(options) as instance, zmq.Context() as context, context.socket(zmq.DEALER) as asks:
        asks.rcvtimeo, asks.linger = 10_000, 0
        asks.connect(options.kv_events_replay_endpoint)
        body = json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}})
        connection = HTTPConnection("127.0.0.1", instance.port, timeout=limit(20))
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
        asks.send_multipart([b"", pack_seq(0)])
        follower = Follower()
        while unpack_seq((frames := asks.recv_multipart())[1]) != END:
            assert follower.take(Frame(unpack_seq(frames[1]), frames[2]))
    tokens = [token for _, page in follower.pages.values() for token in page]
    assert tokens[: len(prompt)] == prompt
