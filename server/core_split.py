"""Which cores of a host each instance's model worker gets.

With at least as many cores as instances, no two instances share one: a prefill's long steps then never stretch a
decode's short ones. The cores are divided evenly in runs of neighbours, and those left over go to the first
instances (prefills come first: only they are limited by arithmetic alone). With fewer cores than instances the cores
are dealt out in turn, one each, so that as few instances as possible share one; it works, and latencies suffer.
An instance that is to have more threads than cores of its own is bound to none.
"""

from __future__ import annotations


def split_cores(cores: list[int], instances: int) -> list[list[int]]:
    """The cores of each instance; every instance gets at least one. ``cores`` must not be empty."""
    if len(cores) < instances:
        return [[cores[i % len(cores)]] for i in range(instances)]
    share, extra = divmod(len(cores), instances)
    split = []
    start = 0
    for i in range(instances):
        end = start + share + (i < extra)
        split.append(cores[start:end])
        start = end
    return split
