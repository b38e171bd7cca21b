"""The division of a host's cores among the instances' model workers.

With at least as many cores as instances, no two instances share one. Then a prefill's long steps never stretch a
decode's short ones. No instance uses cores of two NUMA nodes: each is put on the node with most cores left for it.

A node's cores are divided evenly in runs of neighbours. The larger shares go to the first instances. Prefills come
first, because only they are limited by arithmetic alone.

With fewer cores than instances, each gets one core in turn, so that as few instances as possible share one. This works,
but latencies suffer. An instance with more threads than cores of its own is bound to none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def split_cores(cores: Sequence[int], instances: int) -> list[list[int]]:
    """Divide ``cores`` in runs of neighbours; return one list for each instance, the longer ones first.

    ``cores`` must not be empty. If there are fewer cores than instances, each instance gets one core, which others may
    get as well.
    """
    if len(cores) < instances:
        return [[cores[i % len(cores)]] for i in range(instances)]
    split = []
    start = 0
    for share in split_evenly(len(cores), instances):
        split.append(list(cores[start : start + share]))
        start += share
    return split


def split_nodes(nodes: Iterable[Sequence[int]], instances: int) -> list[list[int]]:
    """Divide the cores of several NUMA nodes; return one list for each instance, the longest first.

    No list has cores of two nodes. No node may be empty.
    """
    nodes = list(nodes)
    guests = [0] * len(nodes)
    for _ in range(instances):
        roomiest = max(range(len(nodes)), key=lambda i: len(nodes[i]) / (guests[i] + 1))
        guests[roomiest] += 1
    shares = [share for cores, count in zip(nodes, guests, strict=True) if count for share in split_cores(cores, count)]
    return sorted(shares, key=len, reverse=True)


def split_evenly(total: int, parts: int) -> list[int]:
    """Divide ``total`` into ``parts`` whole numbers that differ by one at most, the larger ones first."""
    share, extra = divmod(total, parts)
    return [share + (i < extra) for i in range(parts)]
