"""Random lives of requests against a model of what each slot holds.

The KV of a position depends on its whole prefix, so the model notes for each slot the namespace and the prefix that was
last written there. A wrong, stale or shared slot then shows as a wrong prefix. ``worker_rows`` follows the request
table only through what the scheduler would send: slots allocated, prefixes hit, and ``Rewrite``. If there are window
pages, ``worker_pages`` follows ``take_changes``, and each request must find in its window what was written for its own
prefix.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from support.examples import examples
from support.radix_nodes import findable

from pdserve.mem_cache.allocator import PagedTokenToKVPoolAllocator
from pdserve.mem_cache.base_prefix_cache import KVHold
from pdserve.mem_cache.factory import make_prefix_cache
from pdserve.mem_cache.req_to_token_pool import ReqToTokenPool
from pdserve.mem_cache.window_pages import WindowPages
from pdserve.server.options import ServerOptions

NUM_PAGES = 14
MAX_REQS = 4
CONTEXT_LEN = 64
token_ids = st.integers(0, 1)
# Most prompts share a long prefix, so that hits, splits and duplicates are common.
prompts = st.builds(
    lambda num_shared, own: [0] * num_shared + own, st.integers(0, 20), st.lists(token_ids, min_size=1, max_size=6)
)
namespaces = st.sampled_from(["", "tenant"])


def i32(values):
    return np.array(values, dtype=np.int32)


@dataclass
class Running:
    """A request: ``tokens`` known so far, of which ``hold.kv_len`` have KV."""

    tokens: list[int]
    hold: KVHold
    worker_row: list[int] = field(default_factory=list)
    hidden_from: float = math.inf
    """From which of its tokens on what it shares was condemned, or withdrawn as the pool became smaller."""

    @property
    def computed(self):
        return self.tokens[: self.hold.kv_len]


class MemCacheMachine(RuleBasedStateMachine):
    running = Bundle("running")

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(["lru", "lfu", "fifo", "mru", "priority", "slru"]),
        keep=st.sampled_from([True, True, True, False]),
        window=st.sampled_from([0, 0, 1, 3, 6, 9]),
        spare=st.integers(0, 8),
    )
    def start(self, page_size, policy, keep, window, spare):
        options = ServerOptions(radix_eviction_policy=policy, disable_radix_cache=not keep)
        self.keep = keep
        self.page_size = page_size
        self.windows = None
        if window:
            pages = -(-(window - 1) // page_size) + 1 + spare
            self.windows = WindowPages(window, pages * page_size, NUM_PAGES, page_size)
        self.worker_pages = np.zeros(NUM_PAGES + 1, dtype=np.int32)
        self.window_written: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.allocator = PagedTokenToKVPoolAllocator(NUM_PAGES * page_size, page_size, self.windows)
        self.table = ReqToTokenPool(MAX_REQS, CONTEXT_LEN)
        self.cache = make_prefix_cache(options, self.allocator, self.table)
        self.root = self.cache.match_prefix(i32([])).node
        self.reqs: list[Running] = []
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.cached: set[tuple[str, tuple[int, ...]]] = set()
        self.proven: set[tuple[str, tuple[int, ...]]] = set()
        """Cached prefixes that were good for a request, since when no request failed that began so."""

    # What a scheduler does, in parts.

    def write(self, req, slots):
        """Give the request's next positions ``slots`` and their KV."""
        hold, start = req.hold, req.hold.kv_len
        self.table.table[hold.row, start : start + len(slots)] = slots
        hold.kv_len += len(slots)
        if self.windows is not None and len(slots):
            self.windows.move(hold.window, self.table.table[hold.row], start, hold.kv_len)
            pages, window_pages = self.windows.take_changes().T
            self.worker_pages[pages] = window_pages
        for slot in slots:
            pos = len(req.worker_row)
            req.worker_row.append(int(slot))
            self.written[int(slot)] = (req.hold.extra_key, tuple(req.tokens[: pos + 1]))
            if self.windows is not None:
                assert self.window_slot(slot) >= self.page_size
                self.window_written[self.window_slot(slot)] = self.written[int(slot)]

    def window_slot(self, slot):
        """Return where the worker keeps the windowed layers' KV of the token in ``slot``."""
        return int(self.worker_pages[slot // self.page_size]) * self.page_size + int(slot) % self.page_size

    def is_usable(self, prefix, tree):
        """Return whether all that the token after a cached ``prefix`` sees is there."""
        if self.windows is None:
            return True
        namespace, tokens = prefix
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        seen = [end for end in ends if end > len(tokens) - self.windows.window + 1]
        return all(self.windows.page_of[tree[namespace, tokens[:end]][0] // self.page_size] for end in seen)

    def make_room(self, num_tokens):
        """Evict until ``num_tokens`` slots are free; False when that can't be."""
        short = num_tokens - self.allocator.available_size()
        if short > 0:
            self.evict(short)
        return self.allocator.available_size() >= num_tokens

    def aligned_prefixes(self, tokens, extra_key):
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return {(extra_key, tuple(tokens[:end])) for end in ends} if self.keep else set()

    def extend(self, req, seq_len):
        hold = req.hold
        if self.windows is not None:
            room = self.windows.writable_len(hold.window, hold.kv_len)
            assert room > 0
            seq_len = min(seq_len, hold.kv_len + room)
        last_slot = req.worker_row[-1] if req.worker_row else 0
        num_pages = -(-seq_len // self.page_size) - -(-hold.kv_len // self.page_size)
        room = num_pages == 0 or self.make_room(num_pages * self.page_size)
        slots = self.allocator.alloc_extend(hold.kv_len, seq_len, last_slot)
        assert (slots is not None) == room
        if slots is not None:
            assert len(slots) == seq_len - hold.kv_len
            self.write(req, slots)

    def tree(self):
        """Read the cached page-aligned prefixes with the slots of their last page from the nodes."""
        found = {}
        paths = {self.root: ()}
        for node, edge, child in findable(self.cache, self.root) if self.keep else ():
            start = paths[node]
            namespace = edge[: -4 * self.page_size].decode() if node is self.root else start[0]
            tokens = () if node is self.root else start[1]
            key = tuple(np.frombuffer(child.key, dtype=np.int32).tolist())
            paths[child] = (namespace, tokens + key)
            for end in range(self.page_size, len(key) + 1, self.page_size):
                found[namespace, tokens + key[:end]] = child.slots[end - self.page_size : end].tolist()
        return found

    def pinned_by(self, req):
        """Return the findable prefixes that a request pins."""
        return self.aligned_prefixes(req.tokens[: min(req.hold.cached_len, req.hidden_from)], req.hold.extra_key)

    def pinned(self):
        """Return the prefixes that any request pins."""
        return set().union(*(self.pinned_by(r) for r in self.reqs))

    def pinned_pages(self):
        """Return the pages that requests share, findable or not."""
        return {slot // self.page_size for r in self.reqs for slot in r.worker_row[: r.hold.cached_len]}

    def within(self, slots):
        """Return how many of ``slots`` come before the first that the pool no longer has."""
        beyond = (i for i, slot in enumerate(slots) if slot // self.page_size > self.allocator.num_pages)
        return next(beyond, len(slots))

    def lose(self, lost):
        """Condemn or withdraw these prefixes: what requests pin of them stays, and is not found."""
        for req in self.reqs:
            if mine := self.pinned_by(req) & lost:
                req.hidden_from = min(len(prefix) for _, prefix in mine) - self.page_size
        self.cached -= lost
        self.proven &= self.cached

    def share(self, req, tokens, cache_req):
        """Give the cache what is computed of ``tokens`` by ``cache_req``."""
        if req.hidden_from == math.inf:
            start = req.hold.cached_len
            shared = start + self.within(req.worker_row[start : len(tokens)])
            self.cached |= self.aligned_prefixes(tokens[:shared], req.hold.extra_key)
        rewrite = cache_req(req.hold, i32(tokens))
        if rewrite is not None:
            assert self.keep
            assert rewrite.slots.size
            for i, slot in enumerate(rewrite.slots.tolist()):
                assert req.worker_row[rewrite.start + i] != slot
                req.worker_row[rewrite.start + i] = slot

    # Rules.

    @rule(target=running, tokens=prompts, extra_key=namespaces, chunk=st.integers(1, 24))
    def admit(self, tokens, extra_key, chunk):
        req = self.admit_req(tokens, extra_key, chunk)
        return multiple() if req is None else req

    @rule(target=running, twin=running)
    def admit_twin(self, twin):
        """Admit the same prompt again while the first computes it. The one that shares second has duplicates."""
        req = self.admit_req(list(twin.tokens), twin.hold.extra_key, len(twin.tokens))
        return multiple() if req is None else req

    def admit_req(self, tokens, extra_key, chunk):
        seen = self.cache.peek(i32(tokens[:-1]), extra_key)
        match = self.cache.match_prefix(i32(tokens[:-1]), extra_key)
        assert len(match.slots) == seen
        known, tree = self.aligned_prefixes(tokens[:-1], extra_key) & self.cached, self.tree()
        assert len(match.slots) == max((len(p[1]) for p in known if self.is_usable(p, tree)), default=0)
        for i, slot in enumerate(match.slots.tolist()):
            assert self.written[slot] == (extra_key, tuple(tokens[: i + 1]))
        if self.windows is not None and not self.windows.can_promise(CONTEXT_LEN):
            return None
        row = self.table.alloc()
        assert (row is None) == (len(self.reqs) == MAX_REQS)
        if row is None:
            return None
        req = Running(tokens, self.cache.hold(row, match, extra_key), match.slots.tolist())
        self.reqs.append(req)
        if self.windows is not None:
            self.windows.promise(req.hold.window, CONTEXT_LEN)
        self.extend(req, min(len(tokens), req.hold.kv_len + chunk))
        return req

    @rule(req=running, chunk=st.integers(1, 24))
    def next_chunk(self, req, chunk):
        if req in self.reqs and req.hold.kv_len < len(req.tokens):
            self.share(req, req.computed, self.cache.cache_unfinished_req)
            self.extend(req, min(len(req.tokens), req.hold.kv_len + chunk))

    @rule(req=running, behind=st.integers(0, 3))
    def share_running(self, req, behind):
        if req in self.reqs:
            num_tokens = max(0, req.hold.kv_len - behind)
            self.share(req, req.tokens[:num_tokens], self.cache.cache_unfinished_req)
            shared = self.keep and req.hidden_from == math.inf and not self.allocator.beyond
            assert req.hold.cached_len >= (num_tokens // self.page_size * self.page_size if shared else 0)

    @rule(sampled=st.lists(token_ids, min_size=MAX_REQS, max_size=MAX_REQS))
    def decode(self, sampled):
        reqs = [r for r in self.reqs if r.hold.kv_len == len(r.tokens) < CONTEXT_LEN]
        begin = [r for r in reqs if r.hold.kv_len % self.page_size == 0]
        room = not begin or self.make_room(len(begin) * self.page_size)
        seq_lens, last_slots = i32([r.hold.kv_len + 1 for r in reqs]), i32([r.worker_row[-1] for r in reqs])
        slots = self.allocator.alloc_decode(seq_lens, last_slots)
        assert (slots is not None) == room
        if slots is not None:
            for req, token, slot in zip(reqs, sampled, slots, strict=False):
                req.tokens.append(token)
                self.write(req, [slot])

    @rule(req=consumes(running), behind=st.integers(0, 3))
    def finish(self, req, behind):
        if req in self.reqs:
            tokens = req.tokens[: max(0, req.hold.kv_len - behind)]
            self.prove(req)
            self.share(req, tokens, self.cache.cache_finished_req)
            self.prove(req)
            self.reqs.remove(req)

    @rule(req=consumes(running))
    def release(self, req):
        if req in self.reqs:
            self.cache.release_req(req.hold)
            self.reqs.remove(req)

    @rule(tokens=prompts, extra_key=namespaces)
    def offer(self, tokens, extra_key):
        """Insert pages that come from elsewhere, not from a request of ours."""
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        slots = self.allocator.alloc_extend(0, len(tokens), 0)
        if slots is None:
            return
        for i, slot in enumerate(slots.tolist()):
            self.written[slot] = (extra_key, tuple(tokens[: i + 1]))
        known = self.cache.insert(i32(tokens), slots, extra_key)
        self.allocator.free(slots[:known])
        self.cached |= self.aligned_prefixes(tokens, extra_key)

    @rule(num_tokens=st.integers(0, 20))
    def evict(self, num_tokens):
        evictable, free = self.cache.evictable_size(), self.allocator.available_size()
        freed = self.cache.evict(num_tokens)
        assert freed == min(-(-num_tokens // self.page_size) * self.page_size, evictable)
        self.after_loss(freed, free)

    @rule(really=st.sampled_from([False, False, False, True]))
    def reset(self, really):
        if not really:  # a full cache is the more interesting one
            return
        evictable, free = self.cache.evictable_size(), self.allocator.available_size()
        freed = self.cache.reset()
        assert freed == evictable
        self.after_loss(freed, free)

    @rule(req=running, everybody=st.booleans())
    def sample(self, req, everybody):
        """Note that all that the request has computed has given it a token.

        Other requests get the proof when it ends, or now if ``everybody``.
        """
        if req in self.reqs:
            req.hold.proven = req.hold.kv_len
            if everybody:
                self.cache.prove([r.hold for r in self.reqs])
                for r in self.reqs:
                    self.prove(r)

    def prove(self, req):
        if req.hold.proven >= req.hold.cached_len:
            self.proven |= self.pinned_by(req)

    @rule(req=running, known=st.sampled_from(["hold", "tokens"]), start=st.none() | st.integers(0, 20))
    def condemn(self, req, known, start):
        if req not in self.reqs or not self.keep:
            return
        extra_key, tokens, size = req.hold.extra_key, tuple(req.tokens), self.page_size
        end = req.hold.cached_len
        if known == "tokens":
            ends = range(size, len(tokens) + 1, size)
            end = max((end for end in ends if (extra_key, tokens[:end]) in self.cached), default=0)
        path = [(extra_key, tokens[:at]) for at in range(size, end + 1, size)]
        if start is None:
            kept = next((i for i, prefix in enumerate(path) if prefix not in self.proven), len(path)) * size
        else:
            kept = min(start // size * size, end)
        lost = set()
        if known == "hold" and req.hidden_from < end:
            kept = int(req.hidden_from)
        else:
            if kept < end:
                bad = tokens[: kept + size]
                lost = {(key, prefix) for key, prefix in self.cached if key == extra_key and prefix[: len(bad)] == bad}
            if start is None:
                self.proven -= set(path)
        free, pages = self.allocator.available_size(), {self.tree()[prefix][0] // size for prefix in lost}
        hold = req.hold if known == "hold" else None
        assert self.cache.condemn(i32(tokens), extra_key, hold, start) == kept
        self.lose(lost)
        assert self.allocator.available_size() == free + len(pages - self.pinned_pages()) * size

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def resize(self, num_pages):
        if self.windows is not None and self.windows.committed > self.windows.pages_for(num_pages):
            return
        tree, in_use = self.tree(), self.allocator.size - self.allocator.available_size()
        self.allocator.resize(num_pages)
        if self.windows is not None:
            self.windows.resize(num_pages)
        beyond = {prefix for prefix, slots in tree.items() if self.within(slots) == 0}
        lost = {
            (key, tokens)
            for key, tokens in tree
            if any((key, tokens[:end]) in beyond for end in range(self.page_size, len(tokens) + 1, self.page_size))
        }
        self.cache.withdraw()
        self.lose(lost)
        gone = {tree[prefix][0] // self.page_size for prefix in lost} - self.pinned_pages()
        assert self.allocator.size - self.allocator.available_size() == in_use - len(gone) * self.page_size

    def after_loss(self, freed, free_before):
        assert self.allocator.available_size() == free_before + freed
        left = set(self.tree())
        assert self.pinned() <= left <= self.cached
        assert (len(self.cached) - len(left)) * self.page_size == freed
        self.cached = left
        self.proven &= left

    # What must hold after every step.

    @invariant()
    def every_page_has_one_owner(self):
        self.cache.check_invariants([r.hold for r in self.reqs])

    @invariant()
    def every_request_sees_its_own_prefix(self):
        for req in self.reqs:
            row = self.table.table[req.hold.row, : req.hold.kv_len].tolist()
            assert row == req.worker_row
            for i, slot in enumerate(row):
                assert self.written[slot] == (req.hold.extra_key, tuple(req.tokens[: i + 1]))

    @invariant()
    def the_cache_holds_what_was_written(self):
        tree = self.tree()
        assert tree.keys() == self.cached
        for (extra_key, prefix), slots in tree.items():
            assert [self.written[slot] for slot in slots] == [
                (extra_key, prefix[: len(prefix) - self.page_size + i + 1]) for i in range(self.page_size)
            ]
        pinned, found = self.pinned_pages(), {slots[0] // self.page_size for slots in tree.values()}
        sizes = len(pinned), len(pinned | found)
        assert (self.cache.protected_size(), self.cache.total_size()) == tuple(n * self.page_size for n in sizes)

    @invariant()
    def every_window_holds_what_was_written(self):
        """Check the windows of each request's next token, and of the prefixes that a match may find."""
        if self.windows is None:
            return
        pages, window_pages = self.windows.take_changes().T
        self.worker_pages[pages] = window_pages
        assert self.worker_pages.tolist() == self.windows.page_of.tolist()
        for req in self.reqs:
            seen = range(max(0, req.hold.kv_len - self.windows.window + 1), req.hold.kv_len)
            for pos in seen:
                slot = req.worker_row[pos]
                assert self.window_slot(slot) >= self.page_size
                assert self.window_written[self.window_slot(slot)] == (req.hold.extra_key, tuple(req.tokens[: pos + 1]))
        for slots in self.tree().values():
            if self.worker_pages[slots[0] // self.page_size]:
                assert [self.window_written[self.window_slot(s)] for s in slots] == [self.written[s] for s in slots]

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for req in self.reqs:
            self.cache.release_req(req.hold)
        self.cache.reset()
        self.cache.check_invariants([])
        assert self.allocator.available_size() == self.allocator.size
        assert self.table.available_size() == MAX_REQS


TestMemCache = MemCacheMachine.TestCase
TestMemCache.settings = settings(
    max_examples=examples(120), stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
