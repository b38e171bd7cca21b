"""Which cores of a host each instance's model worker gets.

With at least as many cores as instances, no two instances share one: a prefill's long steps then never stretch a
decode's short ones. No instance straddles two NUMA nodes: each is put on the node that has most cores left for it. A
node's cores are divided evenly in runs of neighbours, and the bigger shares go to the first instances (prefills come
first: only they are limited by arithmetic alone). With fewer cores than instances the cores are dealt out in turn, one
each, so that as few instances as possible share one; it works, and latencies suffer. An instance that is to have more
threads than cores of its own is bound to none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def split_cores(cores: Sequence[int], instances: int) -> list[list[int]]:
    """The cores of each instance; every instance gets at least one. ``cores`` must not be empty."""
    if len(cores) < instances:
        return [[cores[i % len(cores)]] for i in range(instances)]
    split = []
    start = 0
    for share in split_evenly(len(cores), instances):
        split.append(list(cores[start : start + share]))
        start += share
    return split


def split_nodes(nodes: Iterable[Sequence[int]], instances: int) -> list[list[int]]:
    """The same for the cores of several NUMA nodes, none of them empty."""
    nodes = list(nodes)
    guests = [0] * len(nodes)
    for _ in range(instances):
        roomiest = max(range(len(nodes)), key=lambda i: len(nodes[i]) / (guests[i] + 1))
        guests[roomiest] += 1
    shares = [share for cores, count in zip(nodes, guests, strict=True) if count for share in split_cores(cores, count)]
    return sorted(shares, key=len, reverse=True)


def split_evenly(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` whole numbers that differ by one at most, the bigger ones first."""
    share, extra = divmod(total, parts)
    return [share + (i < extra) for i in range(parts)]
