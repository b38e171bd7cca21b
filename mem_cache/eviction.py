"""The order in which unlocked leaves of the radix tree are evicted.

Life of a heap entry:

- pushed when a node becomes an unlocked leaf, or when an unlocked leaf is used;
- superseded by a later push of the same node, or outdated because the node was locked, grew a child or left the tree;
- dropped when it comes to the top, or at the next sweep.

The heap is never searched, so each step costs O(log leaves).
"""

from __future__ import annotations

import heapq

from .eviction_policies import Priority
from .tree_node import TreeNode

SWEEP_SLACK = 1024


class EvictionHeap:
    """The unlocked leaves in the order of a policy."""

    def __init__(self, priority: Priority) -> None:
        self._priority = priority
        self._entries: list[tuple[tuple[int, int], int, TreeNode]] = []
        self._pushes = 0
        self._sweep_above = SWEEP_SLACK

    def push(self, node: TreeNode) -> None:
        """Add ``node``, an unlocked leaf, with its present priority. An earlier entry of the node no longer counts."""
        self._pushes += 1
        node.heap_seq = self._pushes
        heapq.heappush(self._entries, (self._priority(node), self._pushes, node))
        if len(self._entries) > self._sweep_above:
            self.sweep()

    def peek(self) -> TreeNode | None:
        """Return the leaf to evict next, or None if there is none. It stays in the heap."""
        while self._entries:
            _, seq, node = self._entries[0]
            if node.heap_seq == seq and node.is_evictable:
                return node
            heapq.heappop(self._entries)
        return None

    def nodes(self) -> list[TreeNode]:
        """Return the unlocked leaves in the heap, each once, in no particular order."""
        return [node for _, seq, node in self._entries if node.heap_seq == seq and node.is_evictable]

    def sweep(self) -> None:
        """Drop entries that were superseded, or the node of which is no unlocked leaf any more.

        Done each time the heap has doubled, so it takes O(1) per push on average.
        """
        self._entries = [e for e in self._entries if e[2].heap_seq == e[1] and e[2].is_evictable]
        heapq.heapify(self._entries)
        self._sweep_above = 2 * len(self._entries) + SWEEP_SLACK
