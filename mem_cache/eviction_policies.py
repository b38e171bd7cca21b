"""The registry of eviction policies: which leaves of the radix tree are evicted first.

To add one, write a function like these, in a file of its own or here, and add a line to ``EVICTION_POLICIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .tree_node import TreeNode

Priority = Callable[["TreeNode"], tuple[int, int]]
"""Rank of a leaf; the lowest is evicted first."""


def lru(node: TreeNode) -> tuple[int, int]:
    """Return a leaf's rank by last use: the least recently used leaf has the lowest, and is evicted first."""
    return node.last_access, 0


def lfu(node: TreeNode) -> tuple[int, int]:
    """Return a leaf's rank by matches: the least often matched is evicted first.

    Among equals it is the least recently used.
    """
    return node.hit_count, node.last_access


def fifo(node: TreeNode) -> tuple[int, int]:
    """Return a leaf's rank by age: the oldest leaf is evicted first."""
    return node.created, 0


def mru(node: TreeNode) -> tuple[int, int]:
    """Return a leaf's rank by last use: the most recently used leaf is evicted first.

    That keeps the start of a loop over more prompts than fit.
    """
    return -node.last_access, 0


def priority(node: TreeNode) -> tuple[int, int]:
    """Return a leaf's rank by the highest priority of the requests that used it; the lowest is evicted first.

    Among equals it is the least recently used.
    """
    return node.priority, node.last_access


def slru(node: TreeNode) -> tuple[int, int]:
    """Return a leaf's rank by segment: leaves that were never matched again are evicted before those that were.

    In each segment the least recently used is first. So prompts that come once cannot evict prompts that come again,
    however many they are.
    """
    return int(node.hit_count > 0), node.last_access


EVICTION_POLICIES: Mapping[str, Priority] = MappingProxyType(
    {"lru": lru, "lfu": lfu, "fifo": fifo, "mru": mru, "priority": priority, "slru": slru}
)

if TYPE_CHECKING:
    EvictionPolicyName = str
else:
    EvictionPolicyName = Literal[tuple(EVICTION_POLICIES)]
"""A name in ``EVICTION_POLICIES``. The command line shows and checks these choices; a type checker can't read them."""
