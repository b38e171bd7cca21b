"""A node of the radix tree: a page-aligned run of tokens and the slots that hold their KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

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
    own clock; ``created`` is when the request began that stored it. ``priority`` is the highest of the requests that
    stored or held it. ``proven``: a token was sampled from its KV with finite logits, and since then none was not. A
    node without parent is the root, or has left the tree.
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
        "proven",
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
        self.proven = False
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

    def is_piece_before(self, child: TreeNode) -> bool:
        """Whether this and ``child`` could be one node: nothing ends or branches off between the two, the same requests
        pin them, as much is known of their KV, and no eviction policy can tell them apart. Never true of the root.
        """
        return (
            self.parent is not None
            and len(self.children) == 1
            and child.parent is self
            and self._traits == child._traits
        )

    @property
    def _traits(self) -> tuple[int | bool, ...]:
        return self.lock_ref, self.proven, self.created, self.last_access, self.hit_count, self.priority

    def absorb(self, above: Sequence[TreeNode]) -> None:
        """Prepend the runs of ``above`` (the parent, its parent, and so on) to this one; those nodes leave the tree."""
        top = above[-1]
        runs = [*reversed(above), self]
        self.key = b"".join(node.key for node in runs)
        self.slots = np.concatenate([node.slots for node in runs])
        self.slots.setflags(write=False)
        hashes = [node.hashes for node in runs if node.hashes is not None]
        self.hashes = list(chain.from_iterable(hashes)) if len(hashes) == len(runs) else None
        self.edge, self.parent = top.edge, top.parent
        assert self.parent is not None
        self.parent.children[self.edge] = self
        for node in above:
            node.parent, node.children = None, {}

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
