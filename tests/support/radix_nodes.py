"""The nodes of a radix tree, read from the outside."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pdserve.mem_cache.page_hash import TOKEN_BYTES, prompt_hashes
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


def require_true_names(cache: RadixCache) -> None:
    """Assert that the page names that nodes remember are those of their whole prefixes."""
    node = cache.match_prefix(np.empty(0, dtype=np.int32)).node
    root, size = list(node.path_up())[-1], cache.page_size
    seed = cache._watchers[0].seed()
    paths: dict[TreeNode, tuple[str, bytes]] = {root: ("", b"")}
    for parent, edge, child in findable(cache, root):
        namespace, before = paths[parent]
        if parent is root:
            namespace = edge[: -size * TOKEN_BYTES].decode()
        paths[child] = namespace, before + child.key
        names = prompt_hashes(seed, np.frombuffer(before + child.key, dtype=np.int32), size, namespace)
        assert child.hashes in (None, names[len(before) // (size * TOKEN_BYTES) :])
