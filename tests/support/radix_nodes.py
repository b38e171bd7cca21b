"""The nodes of a radix tree, read from the outside."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.mem_cache.radix_cache import RadixCache
from pdserve.mem_cache.tree_node import TreeNode


def findable(cache: RadixCache, root: TreeNode) -> Iterator[tuple[TreeNode, bytes, TreeNode]]:
    """Node, edge and child for all that walks can find, parents first."""
    stack = [root]
    while stack:
        node = stack.pop()
        for edge, child in node.children.items():
            if child not in cache._hidden:
                yield node, edge, child
                stack.append(child)
