"""Table of the instances that computed prompts last, by the hashes of their blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush
from sys import getsizeof
from typing import NamedTuple

MAX_HOLDERS = 8
"""Maximum number of instances that a block has."""
MAX_OWNERS = 256
"""Maximum number of owners with a share of their own. Key files may have more.

A router without keys even takes the names that clients give.
"""
SHARE_BYTES, BLOCK_BYTES = 1024, 300
"""Memory of a share, and for each of its blocks, above which it is copied. A dict never shrinks by itself."""
OTHERS = ""
"""Owner of the blocks of all others, and of requests without a key."""

Holders = tuple[int, ...]
"""Numbers of instances, the last one first."""


class PrefixMatch(NamedTuple):
    """The longest known prefix of a prompt."""

    blocks: int
    """Its length in blocks; 0 if no block is known."""
    holders: list[int]
    """The instances that computed it last."""


NO_MATCH = PrefixMatch(0, [])


class PrefixTable:
    """Table of at most ``capacity`` blocks, with a list of them by last use (LRU) for each owner.

    A full table drops blocks of the owner that has most. So an owner keeps what it has up to an equal share, whatever
    others send.

    A block's hash covers all blocks before it, and the owner's name (``Facts.blocks``). All blocks of a prompt are used
    together, its end first, so the end of a prompt is dropped before its beginning.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._shares: dict[str, OrderedDict[int, Holders]] = {}
        """Blocks of each owner, the one used longest ago first. No share is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._shares.values()))

    def match(self, owner: str, blocks: Sequence[int], among: Container[int]) -> PrefixMatch:
        """Return the longest prefix of ``blocks`` that instances in ``among`` computed. The table stays as it is."""
        share = self._shares.get(owner) or self._shares.get(OTHERS)
        if share is None:
            return NO_MATCH
        get = share.get
        for count in range(len(blocks), 0, -1):
            known = get(blocks[count - 1])
            if known is not None and (holders := [number for number in known if number in among]):
                return PrefixMatch(count, holders)
        return NO_MATCH

    def record(self, owner: str, blocks: Sequence[int], holders: Holders) -> None:
        """Note that the instances ``holders`` have a prompt of ``owner`` with these ``blocks``.

        Blocks with the same holders share one tuple, which saves most of the memory.
        """
        if not blocks:
            return
        if owner not in self._shares and len(self._shares) >= MAX_OWNERS:
            owner = OTHERS
        share, merged = self._shares.setdefault(owner, OrderedDict()), dict[Holders, Holders]()
        for block in reversed(blocks):
            before = share.get(block, ())
            after = merged.get(before)
            if after is None:
                after = merged[before] = _merged(holders, before)
            share[block] = after
            share.move_to_end(block)
        if (excess := len(self) - self._capacity) > 0:
            self._drop(excess)

    def _drop(self, excess: int) -> None:
        """Drop ``excess`` blocks, each of the owner that has most: the one it used longest ago."""
        sizes = [(-len(share), owner) for owner, share in self._shares.items()]
        heapify(sizes)
        while excess:
            size, owner = -sizes[0][0], heappop(sizes)[1]
            lead = size + sizes[0][0] if sizes else size
            count = min(excess, max(1, lead))
            share = self._shares[owner]
            for _ in range(count):
                share.popitem(last=False)
            excess -= count
            if not share:
                del self._shares[owner]
                continue
            heappush(sizes, (-len(share), owner))
            if getsizeof(share) > SHARE_BYTES + BLOCK_BYTES * len(share):
                self._shares[owner] = OrderedDict(share)


def _merged(new: Holders, old: Holders) -> Holders:
    return tuple(dict.fromkeys((*new, *old)))[:MAX_HOLDERS]
