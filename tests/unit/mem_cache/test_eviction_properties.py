"""Eviction under every policy, compared with a tree that searches all its leaves each time.

The slow tree has its own nodes, counters and rules, written from what ``--radix-eviction-policy`` promises. After every
step both must hold the same pages. It never joins nodes, so joining the pieces of a prompt must not change what goes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.sim import make_generate, make_options

from pdserve.mem_cache.allocator import PagedTokenToKVPoolAllocator
from pdserve.mem_cache.base_prefix_cache import KVHold
from pdserve.mem_cache.factory import make_prefix_cache
from pdserve.mem_cache.req_to_token_pool import ReqToTokenPool
from pdserve.scheduler.kv_memory import KVMemory
from pdserve.scheduler.memory_terms import NO_RESERVE, PoolSizes
from pdserve.scheduler.req import Req, ReqState, Route
from pdserve.server.options import ServerOptions

PAGE, NUM_PAGES, MAX_REQS, MAX_PAGES = 2, 24, 3, 32
Page = tuple[int, ...]


@dataclass(eq=False)
class SlowNode:
    pages: list[Page]
    parent: SlowNode | None
    created: int
    used: int
    hits: int = 0
    priority: int = 0
    pins: int = 0
    children: list[SlowNode] = field(default_factory=list)

    def prefix(self):
        """Root first, all pages down to this node's end."""
        return (self.parent.prefix() if self.parent else []) + self.pages


VALUE = {
    "lru": lambda n: (n.used,),
    "lfu": lambda n: (n.hits, n.used),
    "fifo": lambda n: (n.created,),
    "mru": lambda n: (-n.used,),
    "priority": lambda n: (n.priority, n.used),
    "slru": lambda n: (n.hits > 0, n.used),
}


class SlowTree:
    def __init__(self, policy):
        self.value = VALUE[policy]
        self.root = SlowNode([], None, 0, 0)
        self.clock = 0

    def nodes(self):
        found, todo = [], [self.root]
        while todo:
            node = todo.pop()
            todo += node.children
            found.append(node)
        return found[1:]

    def walk(self, pages, start=None):
        """Return the nodes below ``start`` that hold the longest known prefix. The last one is cut where it ends."""
        node, path = start or self.root, []
        while pages:
            child = next((c for c in node.children if c.pages[0] == pages[0]), None)
            if child is None:
                break
            alike = next((i for i, (a, b) in enumerate(zip(child.pages, pages, strict=False)) if a != b), None)
            alike = min(len(child.pages), len(pages)) if alike is None else alike
            if alike < len(child.pages):
                child = self.cut(child, alike)
            path.append(child)
            node, pages = child, pages[alike:]
        return path

    def cut(self, node, at):
        upper = SlowNode(node.pages[:at], node.parent, node.created, node.used, node.hits, node.priority, node.pins)
        node.parent.children[node.parent.children.index(node)] = upper
        upper.children, node.parent, node.pages = [node], upper, node.pages[at:]
        return upper

    def use(self, path, *, hit=False, priority=None):
        """Mark ``path`` as used. A mere look for a prefix, without ``priority``, does not change its priority."""
        self.clock += 1
        for node in path:
            node.used, node.hits = self.clock, node.hits + hit
            node.priority = node.priority if priority is None else max(node.priority, priority)

    def put(self, pages, priority):
        path = self.walk(pages)
        known = sum(len(n.pages) for n in path)
        if known < len(pages):
            parent = path[-1] if path else self.root
            leaf = SlowNode(pages[known:], parent, self.clock, 0, priority=priority)
            parent.children.append(leaf)
            path.append(leaf)
        self.use(path, priority=priority)
        return known

    def share(self, end, pages, priority, began):
        """Add ``pages`` after ``end``, computed by a request that holds the path there. Returns the new end."""
        path = self.walk(pages, end)
        known = sum(len(n.pages) for n in path)
        if known < len(pages):
            parent = path[-1] if path else end or self.root
            leaf = SlowNode(pages[known:], parent, began, 0, priority=priority)
            parent.children.append(leaf)
            path.append(leaf)
        for node in path:
            node.pins, node.priority = node.pins + 1, max(node.priority, priority)
        self.use(self.path(path[-1]))
        return path[-1]

    def path(self, node):
        return [] if node is self.root else [*self.path(node.parent), node]

    def match(self, pages):
        path = self.walk(pages)
        self.use(path, hit=True)
        return path

    def pin(self, end, by, priority=-math.inf):
        """Pin the path to ``end`` (None: nothing) ``by`` times. Only a pin raises priorities."""
        node = end or self.root
        while node is not self.root:
            node.pins, node.priority = node.pins + by, max(node.priority, priority)
            node = node.parent

    def evict(self, goal):
        while goal > 0:
            leaves = [n for n in self.nodes() if not n.children and not n.pins]
            if not leaves:
                return
            leaf = min(leaves, key=self.value)
            cut = min(goal, len(leaf.pages))
            goal -= cut
            leaf.pages = leaf.pages[: len(leaf.pages) - cut]
            if not leaf.pages:
                leaf.parent.children.remove(leaf)

    def prefixes(self):
        found = set()
        for node in self.nodes():
            whole = node.prefix()
            found |= {tuple(whole[:end]) for end in range(len(whole) - len(node.pages) + 1, len(whole) + 1)}
        return found


@dataclass
class Running:
    """A request in both trees; it holds ``pages``."""

    hold: KVHold
    end: SlowNode | None
    pages: list[Page]
    began: int


class Both:
    """The real tree and the slow one, told the same."""

    def __init__(self, policy):
        self.slow = SlowTree(policy)
        self.allocator = PagedTokenToKVPoolAllocator(NUM_PAGES * PAGE, PAGE)
        self.table = ReqToTokenPool(MAX_REQS, 64)
        self.cache = make_prefix_cache(ServerOptions(radix_eviction_policy=policy), self.allocator, self.table)
        self.root = self.cache.match_prefix(np.empty(0, dtype=np.int32)).node
        self.running = []

    def evict(self, pages):
        self.cache.evict(pages * PAGE)
        self.slow.evict(pages)

    def put(self, pages, priority):
        short = len(pages) - self.allocator.available_size() // PAGE
        if short > 0:
            self.evict(short)
        slots = self.allocator.alloc_extend(0, len(pages) * PAGE, 0)
        if slots is None:
            return
        known = self.cache.insert(tokens(pages), slots, priority=priority)
        self.allocator.free(slots[:known])
        assert known == self.slow.put(pages, priority) * PAGE

    def match(self, pages):
        match = self.cache.match_prefix(tokens(pages))
        assert len(match.slots) == sum(len(n.pages) for n in self.slow.match(pages)) * PAGE

    def hold(self, pages, priority):
        row = self.table.alloc()
        if row is None:
            return
        match = self.cache.match_prefix(tokens(pages))
        path = self.slow.match(pages)
        end = path[-1] if path else None
        self.slow.pin(end, 1, priority)
        found = pages[: len(match.slots) // PAGE]
        self.running.append(Running(self.cache.hold(row, match, "", priority), end, found, self.slow.clock))
        self.slow.clock += 1

    def share(self, which, pages):
        """Let a running request compute more, page by page."""
        if not self.running:
            return
        r = self.running[which % len(self.running)]
        for page in pages[: MAX_PAGES - len(r.pages)]:
            if not self.allocator.available_size():
                self.evict(1)
            row = self.table.table[r.hold.row]
            slots = self.allocator.alloc_extend(r.hold.kv_len, r.hold.kv_len + PAGE, int(row[r.hold.kv_len - 1]))
            if slots is None:
                return
            row[r.hold.kv_len : r.hold.kv_len + PAGE] = slots
            r.hold.kv_len += PAGE
            r.pages = [*r.pages, page]
            self.cache.cache_unfinished_req(r.hold, tokens(r.pages))
            r.end = self.slow.share(r.end, [page], r.hold.priority, r.began)

    def follow(self, which, length, stay):
        """Let another request find what a running one has shared so far. It may end at once."""
        if self.running:
            self.hold(self.running[which % len(self.running)].pages[:length], -1)
            if not stay:
                self.let_go(len(self.running) - 1)

    def let_go(self, which):
        if self.running:
            r = self.running.pop(which % len(self.running))
            self.cache.release_req(r.hold)
            self.slow.pin(r.end, -1)

    def check(self):
        self.cache.check_invariants([r.hold for r in self.running])
        found, paths = set(), {self.root: ()}
        for node in self.root.subtree():
            for child in node.children.values():
                run = np.frombuffer(child.key, dtype=np.int32).reshape(-1, PAGE)
                whole = paths[child] = paths[node] + tuple(map(tuple, run.tolist()))
                found |= {whole[:end] for end in range(len(paths[node]) + 1, len(whole) + 1)}
        assert found == self.slow.prefixes()


def tokens(pages):
    return np.array(pages, dtype=np.int32).reshape(-1)


pages = st.integers(0, 2).map(lambda n: (n, n + 1))
prompts = st.lists(pages, min_size=1, max_size=6)
priorities = st.integers(-1, 2)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), prompts, priorities),
        st.tuples(st.just("match"), prompts),
        st.tuples(st.just("hold"), prompts, priorities),
        st.tuples(st.just("share"), st.integers(0, 2), prompts),
        st.tuples(st.just("follow"), st.integers(0, 2), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("let_go"), st.integers(0, 2)),
        st.tuples(st.just("evict"), st.integers(1, 4)),
    ),
    min_size=10,
    max_size=60,
)


@pytest.mark.parametrize("policy", sorted(VALUE))
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps)
def test_evicts_what_the_policy_says(policy, steps):
    both = Both(policy)
    for name, *arguments in steps:
        getattr(both, name)(*arguments)
        both.check()


def test_both_parts_of_a_prefix_that_is_divided_are_worth_the_same():
    both = Both("priority")
    a, b, c, d = ((n, n) for n in range(4))
    both.put([a, b], 5)
    both.put([c], 5)
    both.put([d], -1)
    both.match([a])
    left = {(a,), (a, b), (c,), (d,)}
    for gone in ((d,), (a, b), (c,), (a,)):
        both.evict(1)
        both.check()
        left.remove(gone)
        assert both.slow.prefixes() == left


@pytest.mark.parametrize("low_first", [False, True])
def test_the_priority_of_requests_reaches_the_tree(low_first):
    """Through the scheduler's memory: a prefix is worth what the request is that computed it."""
    fields = {"radix_eviction_policy": "priority", "schedule_low_priority_values_first": low_first}
    memory = KVMemory(make_options(page_size=4, max_total_tokens=24, **fields), PoolSizes(24), 64)

    def run(start, priority):
        msg = make_generate("r", list(range(start, start + 9)), max_new_tokens=1)
        msg.priority = priority
        req = Req.create(msg, Route.LOCAL, ReqState.WAITING, 1, 1)
        assert memory.admit(req, NO_RESERVE, prefix_limit=8)
        found, req.computed = req.computed, 8
        memory.finish(req)
        return found

    for start, priority in ((100, 5), (200, 1), (300, 3)):
        assert run(start, priority) == 0
    dear, cheap = (200, 100) if low_first else (100, 200)
    assert run(dear, 0) == 8
    assert run(cheap, 0) < 8
