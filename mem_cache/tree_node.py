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
    """One run of tokens. A node without parent is the root, or has left the tree.

    Times are ticks of the tree's own clock.
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
        """Name in ``parent.children``: the first page's bytes, preceded by the namespace below the root. A hidden node
        has a number in front, which is no namespace.
        """
        self.key = key
        """Tokens (int32) as bytes, because comparing them in place is then one ``memcmp``."""
        self.slots = slots
        """Slots of the tokens, [len(key) / 4], read-only."""
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        """Number of requests that pin the node. It never grows from parent to child."""
        self.created = now
        """Time at which the request began that stored the node."""
        self.last_access = now
        self.hit_count = 0
        self.priority = 0
        """Highest priority of the requests that stored or held the node."""
        self.proven = False
        """Whether a token was sampled from its KV with finite logits, and none with others since."""
        self.heap_seq = 0
        self.hashes: list[bytes] | None = None
        """Hashes of its pages (``page_hash.py``); None until they are needed."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this node alone, without its ancestors."""
        return self.slots.size

    @property
    def is_evictable(self) -> bool:
        """Whether this is an unlocked leaf of the tree."""
        return self.lock_ref == 0 and not self.children and self.parent is not None

    def is_piece_before(self, child: TreeNode) -> bool:
        """Return whether this node and its only ``child`` could be joined into one node; False for the root.

        No other path may branch off or end between the two, and the same requests must pin them. Their KV must be
        equally proven, and no eviction policy may distinguish them.
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
        """Yield this node and its ancestors, upwards. The root comes last, or the top of a part without root."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[TreeNode]:
        """Yield this node and all below it, parents first. A node may be removed from the tree once it was yielded."""
        stack = [self]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def make_root() -> TreeNode:
    """Make the root of a tree: a node without tokens and parent."""
    return TreeNode(None, b"", b"", NO_SLOTS, 0)
