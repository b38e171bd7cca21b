"""A node of the radix tree: a page-aligned run of tokens and the slots that hold their KV."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..messages.base import I32

TOKEN_BYTES = 4
NO_SLOTS: I32 = np.empty(0, dtype=np.int32)
NO_SLOTS.setflags(write=False)


class TreeNode:
    """One run. ``edge`` is its name in ``parent.children``: its first page's bytes, below the root after a namespace
    (or, where it is hidden, a number before it, which is no namespace).

    ``key`` is the run's int32 tokens as bytes, because a compare in place is then one ``memcmp``. ``slots``
    [len(key) / 4] is read-only. ``lock_ref`` counts the requests that pin the node, so it never grows from parent
    to child. ``hashes`` are those of its pages (``page_hash.py``), None until asked for. Times are ticks of the tree's
    own clock. ``priority`` is the highest of the requests that stored or held it. A node without parent is the root, or
    has left the tree.
    """

    __slots__ = (
        "children",
        "created",
        "edge",
        "hashes",
        "heap_seq",
        "hit_count",
        "key",
        "last_access",
        "lock_ref",
        "parent",
        "priority",
        "slots",
    )

    def __init__(self, parent: TreeNode | None, edge: bytes, key: bytes, slots: I32, now: int) -> None:
        self.parent = parent
        self.edge = edge
        self.key = key
        self.slots = slots
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        self.created = now
        self.last_access = now
        self.hit_count = 0
        self.priority = 0
        self.heap_seq = 0
        self.hashes: list[bytes] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this run alone."""
        return self.slots.size

    @property
    def is_evictable(self) -> bool:
        """Whether this is an unlocked leaf of the tree."""
        return self.lock_ref == 0 and not self.children and self.parent is not None

    def path_up(self) -> Iterator[TreeNode]:
        """This node and its ancestors, the root (or what is left of the path) last."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[TreeNode]:
        """This node and all below it, parents first. A node may be taken out of the tree once it was yielded."""
        stack = [self]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def make_root() -> TreeNode:
    """The empty run that every path ends in."""
    return TreeNode(None, b"", b"", NO_SLOTS, 0)
