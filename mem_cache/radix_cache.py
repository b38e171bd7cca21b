"""The prefix cache as a radix tree over page-aligned token runs.

Life of a node:

- inserted as a leaf, by ``insert`` or by a request that shares its KV;
- matched, and split at page borders when a prefix diverges inside it. The old node stays the lower part, so requests
  that end in it still do;
- locked while a request pins it or a descendant;
- an unlocked leaf, which is trimmed from its end or evicted. Then its parent may be a leaf.

A request shares its prompt piece by piece, and a prompt may have thousands of pieces. As a request moves on, they are
joined into fewer nodes (``_join_pieces``), so that a walk takes O(log pieces) steps.

Condemned or withdrawn nodes that are locked become *hidden*. They stay in their place under a name that no walk
follows, until no request pins them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..messages.base import I32
from .allocator import TokenToKVPoolAllocator
from .base_prefix_cache import BasePrefixCache, KVHold, PrefixMatch, Rewrite, require_live
from .errors import InvariantViolation, StaleHold, StaleMatch, UnalignedLength, UnbalancedLock
from .eviction import EvictionHeap
from .eviction_policies import Priority, lru
from .invariants import check_holds, check_pages, check_windows, claim_pages, hold_claims, require
from .page_hash import chain, namespace_seed
from .pages import ceil_to_page, floor_to_page
from .req_to_token_pool import ReqToTokenPool
from .tree_node import NO_SLOTS, TOKEN_BYTES, TreeNode, make_root

SHORT_RUN = 1024
"""Tokens of a node that is cheap to copy."""


class Path(NamedTuple):
    """Nodes from (not including) the start of a walk down to its end; together they hold ``slots`` [N]."""

    nodes: list[TreeNode]
    slots: I32


class PageOrigin(NamedTuple):
    """Where pages that enter the tree come from: what their node must know of the request that computed them.

    ``hashes``: of all the pages; empty if the tree is to compute those that it needs.
    """

    extra_key: str
    priority: int
    created: int
    hashes: Sequence[bytes] = ()


class TreeWatcher(Protocol):
    """Something that is told of the tree's pages by their hashes: other tiers, a log of events.

    ``pages`` [N] are the pool's, aligned with ``hashes``.
    """

    def seed(self) -> bytes:
        """Return the seed of the page hashes (``page_hash.model_seed``), equal for all watchers."""

    def stored(self, parent: bytes | None, hashes: Sequence[bytes], key: bytes, pages: I32) -> None:
        """Note that the tree has new pages, which requests can find from now on.

        Their KV may not be computed yet, but steps that are already planned compute it. ``hashes`` and ``pages`` have
        one entry for each page. ``key``: tokens of the pages, as int32 bytes. ``parent``: hash of the page before them,
        None if they begin the prompt.
        """

    def leaving(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Note that the tree is about to free these pages, because memory is short. Their KV can still be copied."""

    def removed(self, hashes: Sequence[bytes]) -> None:
        """Note that the pages with these hashes cannot be found in the tree any more."""

    def cleared(self) -> None:
        """Note that no page can be found in the tree any more."""


class RadixCache(BasePrefixCache):
    """Prefix cache that keeps every computed prefix until its pages are needed. Namespaces share only the root."""

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        req_to_token: ReqToTokenPool,
        priority: Priority = lru,
        watchers: Sequence[TreeWatcher] = (),
    ) -> None:
        super().__init__(allocator, req_to_token)
        self._watchers = watchers
        self._page_bytes = self.page_size * TOKEN_BYTES
        self._short = ceil_to_page(SHORT_RUN, self.page_size)
        self._root = make_root()
        self._hidden: set[TreeNode] = set()
        self._times_hidden = 0
        self._heap = EvictionHeap(priority)
        self._now = 0
        self._evictable = 0
        self._protected = 0

    def match_prefix(self, tokens: I32, extra_key: str = "") -> PrefixMatch:
        key = self._key(tokens)
        path = self._walk(self._root, key, extra_key)
        usable = self.allocator.windows.usable([path.slots])
        if usable < path.slots.size:
            path = self._walk(self._root, key[: usable * TOKEN_BYTES], extra_key)
        for node in path.nodes:
            node.hit_count += 1
        self._touch(path.nodes)
        return PrefixMatch(path.slots, path.nodes[-1] if path.nodes else self._root)

    def peek(self, tokens: I32, extra_key: str = "") -> int:
        return self.allocator.windows.usable([slots for _, slots in self._found(self._key(tokens), extra_key)])

    def peek_pinned(self, tokens: I32, extra_key: str = "", but: Collection[TreeNode] = ()) -> I32:
        found = self._found(self._key(tokens), extra_key)
        # Pinned nodes come first, and of them those that several requests pin.
        pinned = [slots for node, slots in found if node.lock_ref and node not in but]
        usable = self.allocator.windows.usable([slots for _, slots in found])
        return np.concatenate(pinned)[:usable] if pinned else NO_SLOTS

    def _found(self, key: bytes, extra_key: str) -> list[tuple[TreeNode, I32]]:
        """Return the nodes that hold a prefix of ``key``, from the root down, and those of their slots that belong to
        it.
        """
        node, pos = self._root, 0
        found: list[tuple[TreeNode, I32]] = []
        while pos < len(key):
            child = node.children.get(self._edge(node, key, pos, extra_key))
            if child is None:
                break
            if not key.startswith(child.key, pos):
                common = self._common_bytes(child.key, key, pos)
                found.append((child, child.slots[: common // TOKEN_BYTES]))
                break
            node = child
            found.append((node, node.slots))
            pos += len(node.key)
        return found

    def insert(self, tokens: I32, slots: I32, extra_key: str = "", priority: int = 0) -> int:
        if len(tokens) % self.page_size or len(tokens) != len(slots):
            raise UnalignedLength(f"{len(tokens)} tokens in {len(slots)} slots, pages of {self.page_size}")
        path = self._walk(self._root, self._key(tokens), extra_key)
        known = path.slots.size
        self._extend(self._root, path, self._key(tokens), slots, PageOrigin(extra_key, priority, self._now))
        self._raise_priority(path.nodes, priority)
        self._touch(path.nodes)
        return known

    def inc_lock_ref(self, node: TreeNode) -> None:
        path = list(node.path_up())
        if path[-1] is not self._root or self._hidden_top(path) is not None:
            raise UnbalancedLock("a node that has left the tree can't be locked")
        self._lock(path)

    def dec_lock_ref(self, node: TreeNode) -> None:
        path = list(node.path_up())
        if path[-1] is not self._root or node.lock_ref == 0:
            raise UnbalancedLock("unlocked more often than locked")
        for n in path:
            n.lock_ref -= 1
            if n.lock_ref == 0:
                self._protected -= n.num_tokens
                self._evictable += n.num_tokens
        if (top := self._hidden_top(path)) is not None:
            self._drop_hidden(top)
        elif node.is_evictable:
            self._heap.push(node)

    def evict(self, num_tokens: int) -> int:
        goal = ceil_to_page(num_tokens, self.page_size)
        freed: list[I32] = []
        while goal > 0 and (leaf := self._heap.peek()) is not None:
            # Trimming copies what is left of the key: page by page, that would be quadratic in the length of a run.
            while leaf.num_tokens > max(2 * goal, self._short):
                self._split(leaf, floor_to_page(leaf.num_tokens // 2, self.page_size) * TOKEN_BYTES)
            self._tell_leaving(leaf, min(goal, leaf.num_tokens))
            if goal < leaf.num_tokens:
                freed.append(self._trim(leaf, goal))
            else:
                freed.append(leaf.slots)
                self._remove_leaf(leaf)
            goal -= freed[-1].size
        return self._give_back(freed)

    def evictable_size(self) -> int:
        return self._evictable

    def protected_size(self) -> int:
        return self._protected

    def hold(self, row: int, match: PrefixMatch, extra_key: str, priority: int = 0) -> KVHold:
        path = list(match.node.path_up())
        matched = match.slots.size
        is_found = path[-1] is self._root and self._hidden_top(path) is None
        if not is_found or sum(node.num_tokens for node in path) != matched:
            raise StaleMatch(f"a match of {matched} tokens was evicted before it was held")
        self._lock(path)
        self._raise_priority(path[:-1], priority)
        self.req_to_token.table[row, :matched] = match.slots
        hold = KVHold(row, extra_key, match.node, matched, matched, created=self._now, priority=priority)
        self._now += 1
        self.allocator.windows.begin(hold.window, self.req_to_token.table[row], matched)
        return hold

    def cache_unfinished_req(self, hold: KVHold, tokens: I32) -> Rewrite | None:
        require_live(hold)
        if len(tokens) > hold.kv_len:
            raise StaleHold(f"{len(tokens)} tokens can't have KV in {hold.kv_len} slots")
        row = self.req_to_token.table[hold.row]
        start, end = hold.cached_len, floor_to_page(len(tokens), self.page_size)
        end = start + self._within(row[start:end])
        if end <= start or not hold.verified or (self._hidden and self._hidden_top(hold.node.path_up()) is not None):
            return None
        # The walk starts at the hold's node, so a chunk costs what it is long, not what the prompt is long.
        key = self._key(tokens[start:end])
        path = self._walk(hold.node, key, hold.extra_key)
        known = path.slots
        origin = PageOrigin(hold.extra_key, hold.priority, hold.created, self._named(hold, start, key))
        self._extend(hold.node, path, key, row[start:end], origin)
        self._raise_priority(path.nodes, hold.priority)
        self._lock(path.nodes)
        hold.node, hold.cached_len = path.nodes[-1], end
        self._touch(list(hold.node.path_up())[-2::-1])
        self._join_pieces(hold.node)
        if not known.size:
            return None
        ours = row[start : start + known.size]
        self.allocator.windows.replace(hold.window, start, ours, known)
        self.allocator.free(ours)
        row[start : start + known.size] = known
        return Rewrite(start, known)

    def cache_finished_req(self, hold: KVHold, tokens: I32) -> None:
        # Twice: the last tokens that were computed may not have given one yet, which says nothing of those before.
        self.prove([hold])
        self.cache_unfinished_req(hold, tokens)
        self.prove([hold])
        self.release_req(hold)

    def prove(self, holds: Iterable[KVHold]) -> None:
        seen: set[TreeNode] = set()
        for hold in holds:
            if not hold.verified or hold.proven < hold.cached_len:
                continue
            for node in hold.node.path_up():
                if node in seen:
                    break
                node.proven = True
                seen.add(node)

    def condemn(self, tokens: I32, extra_key: str = "", hold: KVHold | None = None, start: int | None = None) -> int:
        if hold is not None:
            nodes = list(hold.node.path_up())[-2::-1]
        else:
            nodes = self._walk(self._root, self._key(tokens), extra_key).nodes
        hidden = next((i for i, node in enumerate(nodes) if node in self._hidden), None)
        if hidden is not None:
            return sum(node.num_tokens for node in nodes[:hidden])
        kept = 0
        for node in nodes:
            if start is not None:
                good = min(node.num_tokens, floor_to_page(start, self.page_size) - kept)
            else:
                good = node.num_tokens if node.proven else 0
            kept += good
            if good < node.num_tokens:
                if good:
                    self._split(node, good * TOKEN_BYTES)
                self._hide(node)
                break
        if start is None:
            for node in nodes:
                node.proven = False
        return kept

    def withdraw(self) -> None:
        tops, stack = [], [self._root]
        while stack:
            node = stack.pop()
            if self._within(node.slots) < node.num_tokens:
                tops.append(node)
            else:
                stack += [child for child in node.children.values() if child not in self._hidden]
        for top in tops:
            if within := self._within(top.slots):
                self._split(top, within * TOKEN_BYTES)
            for watcher in self._watchers:
                for node in self._findable(top):
                    if node.lock_ref == 0:
                        watcher.leaving(self.hashes_of(node), node.slots[:: self.page_size] // self.page_size)
            self._hide(top)
        self._heap.sweep()

    def _within(self, slots: I32) -> int:
        """Return how many of ``slots`` (whole pages) precede the first one beyond the pool's end; all if none is beyond
        it.
        """
        if not self.allocator.beyond:
            return slots.size
        beyond = slots >= (self.allocator.num_pages + 1) * self.page_size
        return int(beyond.argmax()) if beyond.any() else slots.size

    def _hide(self, top: TreeNode) -> None:
        """Let no walk find ``top`` or the nodes below it, and free those of them that no request pins."""
        for watcher in self._watchers:
            for node in self._findable(top):
                watcher.removed(self.hashes_of(node))
        parent = top.parent
        assert parent is not None
        del parent.children[top.edge]
        # Of one prefix there may be several. No namespace begins so, nor has a page that many bytes.
        self._times_hidden += 1
        top.edge = b"\xff" + self._times_hidden.to_bytes(8) + top.key[: self._page_bytes]
        parent.children[top.edge] = top
        self._hidden.add(top)
        self._drop_hidden(top)

    def _findable(self, top: TreeNode) -> Iterator[TreeNode]:
        """Yield ``top``, which walks can find, and all nodes below it that walks can find."""
        stack = [top]
        while stack:
            node = stack.pop()
            stack += [child for child in node.children.values() if child not in self._hidden]
            yield node

    def _hidden_top(self, path: Iterable[TreeNode]) -> TreeNode | None:
        """Return the topmost hidden node of a path that leads up, or None if no node of it is hidden."""
        found = [node for node in path if node in self._hidden] if self._hidden else []
        return found[-1] if found else None

    def _drop_hidden(self, top: TreeNode) -> None:
        parent = top.parent
        assert parent is not None
        self._drop([node for node in top.subtree() if self._is_loose(node, top)])
        if top.parent is None and parent.is_evictable:
            self._heap.push(parent)

    def reset(self) -> int:
        tops = [
            node for child in self._root.children.values() for node in child.subtree() if self._is_loose(node, child)
        ]
        for watcher in self._watchers:
            self._tell_dropped(watcher, tops)
        dropped = self._drop(tops)
        self._heap.sweep()
        return dropped

    def _is_loose(self, node: TreeNode, top: TreeNode) -> bool:
        """Return whether no request pins ``node``, and it is the topmost such node in the subtree of ``top``.

        ``top``: ``node`` itself or a node above it. What pins the nodes above ``top`` does not count.
        """
        return node.lock_ref == 0 and (node is top or (node.parent is not None and node.parent.lock_ref > 0))

    def _drop(self, tops: list[TreeNode]) -> int:
        """Remove ``tops``, which no request pins, and all nodes below them from the tree, and free their pages.

        Return how many tokens they were.
        """
        if not tops:
            return 0
        freed = []
        for top in tops:
            assert top.parent is not None
            del top.parent.children[top.edge]
            for node in top.subtree():
                self._hidden.discard(node)
                node.parent = None
                node.children = {}
                self._evictable -= node.num_tokens
                freed.append(node.slots)
        return self._give_back(freed)

    def check_invariants(self, holds: Iterable[KVHold]) -> None:
        holds = list(holds)
        hidden = [node for top in self._hidden for node in top.subtree()]
        require(all(node.lock_ref for node in hidden), "a hidden prefix that no request pins was kept")
        nodes = list(self._root.subtree())
        require(self._hidden <= set(nodes), "a hidden prefix has left the tree and is remembered")
        for node in nodes:
            self._check_node(node)
        slots = np.concatenate([node.slots for node in nodes])
        self.allocator.check_invariants()
        claims = [
            claim_pages("prefix cache", slots, self.page_size),
            *hold_claims(holds, self.req_to_token, self.page_size),
        ]
        check_pages(self.allocator, claims)
        check_windows(self.allocator, holds, self.req_to_token)
        locks = {node: node.lock_ref for node in nodes}
        check_holds(holds, self.req_to_token, locks)
        evictable = sum(node.num_tokens for node in nodes if node.lock_ref == 0)
        protected = sum(node.num_tokens for node in nodes if node.lock_ref)
        counted, kept = (evictable, protected), (self._evictable, self._protected)
        require(counted == kept, f"(evictable, protected) tokens are {counted}, accounts say {kept}")
        entered = self._heap.nodes()
        leaves = {node for node in nodes if node.is_evictable}
        require(set(entered) == leaves and len(entered) == len(leaves), "the eviction heap misses unlocked leaves")

    def _check_node(self, node: TreeNode) -> None:
        """Raise ``InvariantViolation`` when ``node`` does not fit its parent or its slots."""
        if node is self._root:
            return
        num = node.num_tokens
        is_linked = node.parent is not None and node.parent.children.get(node.edge) is node
        is_named = node.edge.endswith(node.key[: self._page_bytes])
        is_whole = num > 0 and num % self.page_size == 0 and len(node.key) == num * TOKEN_BYTES
        # The message is costly to format, and this runs for every node.
        if not (is_linked and is_named and is_whole):
            raise InvariantViolation(
                f"cache node over slots {node.slots[:1]} …: child of its parent {is_linked}, under its first page "
                f"{is_named}, whole pages {is_whole} ({num} slots, {len(node.key)} bytes of key)"
            )

    def _key(self, tokens: I32) -> bytes:
        """Return the tokens of the whole pages of ``tokens``, as int32 bytes."""
        return np.ascontiguousarray(tokens[: floor_to_page(len(tokens), self.page_size)], dtype=np.int32).tobytes()

    def _edge(self, node: TreeNode, key: bytes, pos: int, extra_key: str) -> bytes:
        """Return the name in ``node.children`` of the child that ``key`` continues with at byte ``pos``.

        It is the page at ``pos``, preceded by the namespace below the root. Pages are of one length, so that a
        namespace before one can't be mistaken for another namespace and page.
        """
        page = key[pos : pos + self._page_bytes]
        return extra_key.encode(errors="surrogatepass") + page if node is self._root and extra_key else page

    def _walk(self, node: TreeNode, key: bytes, extra_key: str) -> Path:
        """Follow ``key`` down from ``node`` as far as it is cached, and return the nodes and their slots.

        If it ends inside a node, that node is split, so that the last node returned is part of ``key`` as a whole.
        """
        nodes: list[TreeNode] = []
        pos = 0
        while pos < len(key):
            child = node.children.get(self._edge(node, key, pos, extra_key))
            if child is None:
                break
            whole = key.startswith(child.key, pos)
            node = child if whole else self._split(child, self._common_bytes(child.key, key, pos))
            nodes.append(node)
            pos += len(node.key)
            if not whole:
                break
        if len(nodes) == 1:
            return Path(nodes, nodes[0].slots)
        return Path(nodes, np.concatenate([n.slots for n in nodes]) if nodes else NO_SLOTS)

    def _common_bytes(self, ours: bytes, theirs: bytes, pos: int) -> int:
        """Return the length in bytes of the whole pages that ``ours`` and ``theirs[pos:]`` begin with alike."""
        num = min(len(ours), len(theirs) - pos) // TOKEN_BYTES
        a = np.frombuffer(ours, dtype=np.int32, count=num)
        b = np.frombuffer(theirs, dtype=np.int32, count=num, offset=pos)
        differ = a != b
        alike = int(differ.argmax()) if differ.any() else num
        return floor_to_page(alike, self.page_size) * TOKEN_BYTES

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """Split ``node`` at byte ``at`` of its key. Return the new upper part, pinned by the same requests; ``node`` is
        the lower.
        """
        parent = node.parent
        assert parent is not None
        num = at // TOKEN_BYTES
        upper = TreeNode(parent, node.edge, node.key[:at], node.slots[:num], node.created)
        upper.lock_ref, upper.last_access, upper.hit_count = node.lock_ref, node.last_access, node.hit_count
        upper.priority, upper.proven = node.priority, node.proven
        if node.hashes is not None:
            pages = num // self.page_size
            upper.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        parent.children[node.edge] = upper
        node.parent, node.key, node.slots = upper, node.key[at:], node.slots[num:]
        node.edge = node.key[: self._page_bytes]
        upper.children[node.edge] = node
        return upper

    def _extend(self, start: TreeNode, path: Path, key: bytes, slots: I32, origin: PageOrigin) -> None:
        """Add a leaf for the part of ``key`` and ``slots`` that is not cached yet, and append it to ``path``.

        ``path``: result of walking ``key`` from ``start``. ``origin``: the leaf's namespace, priority, age and hashes.
        Do nothing if all is cached. Watchers are told of the new pages.
        """
        known = path.slots.size
        if known == len(slots):
            return
        parent = path.nodes[-1] if path.nodes else start
        pos = known * TOKEN_BYTES
        own = np.array(slots[known:], dtype=np.int32)
        own.setflags(write=False)
        leaf = TreeNode(parent, self._edge(parent, key, pos, origin.extra_key), key[pos:], own, origin.created)
        leaf.priority = origin.priority
        if origin.hashes:
            leaf.hashes = list(origin.hashes[known // self.page_size :])
        parent.children[leaf.edge] = leaf
        path.nodes.append(leaf)
        self._evictable += leaf.num_tokens
        for watcher in self._watchers:
            before = self.hashes_of(parent)
            pages = own[:: self.page_size] // self.page_size
            watcher.stored(before[-1] if before else None, self.hashes_of(leaf), leaf.key, pages)

    def _join_pieces(self, lowest: TreeNode) -> None:
        """Join ``lowest``, which a request has just stored or found, with the pieces before it.

        Longer ones are left alone until there is about as much to join them with. So each token is copied O(log n)
        times while a prompt grows, and of n pieces O(log n) nodes are left.
        """
        above: list[TreeNode] = []
        node, size = lowest, lowest.num_tokens
        while (parent := node.parent) is not None and parent.is_piece_before(node) and parent.num_tokens <= 2 * size:
            above.append(parent)
            node, size = parent, size + parent.num_tokens
        if above:
            lowest.absorb(above)

    def _touch(self, nodes: list[TreeNode]) -> None:
        """Mark the nodes of a path from the top as used just now. An unlocked leaf at its end is ranked anew."""
        self._now += 1
        for node in nodes:
            node.last_access = self._now
        if nodes and nodes[-1].is_evictable:
            self._heap.push(nodes[-1])

    def _raise_priority(self, nodes: list[TreeNode], priority: int) -> None:
        """Raise the priority of nodes to that of a request that uses them.

        It is called before the nodes are touched or while they are locked, so that the heap learns of it.
        """
        for node in nodes:
            node.priority = max(node.priority, priority)

    def _lock(self, nodes: list[TreeNode]) -> None:
        for node in nodes:
            if node.lock_ref == 0:
                self._evictable -= node.num_tokens
                self._protected += node.num_tokens
            node.lock_ref += 1

    def _named(self, hold: KVHold, start: int, key: bytes) -> Sequence[bytes]:
        """Return the hashes of the hold's pages of ``key``, which begins at position ``start``, and remember them.

        The result is empty unless the tree is watched, and the hashes of the pages before are known.
        """
        names, first = hold.page_hashes, start // self.page_size
        if not names or len(names) < first or not self._watchers:
            return ()
        end = first + len(key) // self._page_bytes
        if len(names) < end:
            names += chain(names[-1], key[(len(names) - first) * self._page_bytes :], self.page_size)
        return names[first:end]

    def hashes_of(self, node: TreeNode) -> list[bytes]:
        """Return the hashes of the node's pages in order, and compute missing ones of the node and its ancestors.

        Only valid if the tree is watched.
        """
        unknown = []
        while node.hashes is None and node.parent is not None:
            unknown.append(node)
            node = node.parent
        for below in reversed(unknown):
            if below.parent is not None and below.parent.hashes:
                before = below.parent.hashes[-1]
            else:
                before = namespace_seed(self._watchers[0].seed(), below.edge[: -self._page_bytes])
            below.hashes = chain(before, below.key, self.page_size)
            node = below
        return node.hashes or []

    def _tell_leaving(self, leaf: TreeNode, num_tokens: int) -> None:
        slots = leaf.slots[-num_tokens :: self.page_size]
        for watcher in self._watchers:
            hashes = self.hashes_of(leaf)[-(num_tokens // self.page_size) :]
            watcher.leaving(hashes, slots // self.page_size)
            watcher.removed(hashes)

    def _tell_dropped(self, watcher: TreeWatcher, tops: list[TreeNode]) -> None:
        if all(child.lock_ref == 0 or child in self._hidden for child in self._root.children.values()):
            watcher.cleared()
            return
        for top in tops:
            for node in top.subtree():
                watcher.removed(self.hashes_of(node))

    def _trim(self, leaf: TreeNode, num_tokens: int) -> I32:
        """Cut the last ``num_tokens`` tokens (whole pages, not all) off an unlocked leaf, and return their slots. Free
        nothing.
        """
        cut = leaf.slots[-num_tokens:]
        leaf.slots = leaf.slots[:-num_tokens]
        leaf.key = leaf.key[: -num_tokens * TOKEN_BYTES]
        if leaf.hashes is not None:
            del leaf.hashes[-num_tokens // self.page_size :]
        self._evictable -= num_tokens
        return cut

    def _remove_leaf(self, leaf: TreeNode) -> None:
        """Remove an unlocked leaf from the tree. Its parent can be evicted next if it is an unlocked leaf now."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge]
        leaf.parent = None
        self._evictable -= leaf.num_tokens
        if parent.is_evictable:
            self._heap.push(parent)

    def _give_back(self, freed: list[I32]) -> int:
        if not freed:
            return 0
        slots = np.concatenate(freed)
        self.allocator.free(slots)
        return slots.size
