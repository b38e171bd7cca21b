"""Table of the instances that computed prompts last, by the hashes of their blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from sys import getsizeof
from typing import NamedTuple

MAX_HOLDERS = 8
"""Maximum number of instances that a block has."""
MAX_OWNERS = 256
"""Maximum number of owners. Key files may have more keys."""
DROPPED_PART = 64
"""A full table drops 1/64 of its blocks at a time, because finding the owners that have most takes long."""
SHARE_BYTES, BLOCK_BYTES = 1024, 300
"""Memory of a share, and for each of its blocks, above which it is copied. A dict never shrinks by itself.

A dict that only grew has 71 to 116 bytes for each entry. So a share is copied once it has lost 60 % or more.
"""

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

    A full table drops blocks of the owners that have most. So an owner keeps what it has up to an equal share, whatever
    others send. Beyond ``MAX_OWNERS`` it drops all blocks of the owner that was used longest ago.

    A block's hash covers all blocks before it, and the owner's name (``Facts.blocks``). All blocks of a prompt are used
    together, its end first, so the end of a prompt is dropped before its beginning.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._shares: OrderedDict[str, OrderedDict[int, Holders]] = OrderedDict()
        """Blocks of each owner, the one used longest ago first, as are the owners. No share is empty."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def match(self, owner: str, blocks: Sequence[int], among: Container[int]) -> PrefixMatch:
        """Return the longest prefix of ``blocks`` that instances in ``among`` computed. The table stays as it is."""
        share = self._shares.get(owner)
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
        share, merged = self._share(owner), dict[Holders, Holders]()
        size = len(share)
        for block in reversed(blocks):
            before = share.get(block, ())
            after = merged.get(before)
            if after is None:
                after = merged[before] = _merged(holders, before)
            share[block] = after
            share.move_to_end(block)
        self._size += len(share) - size
        if self._size > self._capacity:
            self._drop(self._size - self._capacity + self._capacity // DROPPED_PART)

    def _share(self, owner: str) -> OrderedDict[int, Holders]:
        """Return the blocks of ``owner``, as the owner that was used last; empty if it is new."""
        share = self._shares.get(owner)
        if share is None:
            if len(self._shares) >= MAX_OWNERS:
                self._size -= len(self._shares.popitem(last=False)[1])
            share = self._shares[owner] = OrderedDict()
        self._shares.move_to_end(owner)
        return share

    def _drop(self, excess: int) -> None:
        """Drop ``excess`` blocks of the owners that have most: of each those that it used longest ago.

        Afterwards these owners have equally many, except for one block.
        """
        self._size -= excess
        level = _level(sorted(map(len, self._shares.values()), reverse=True), excess)
        for most in (level + 1, level):
            for owner, share in list(self._shares.items()):
                count = min(excess, len(share) - most)
                if count <= 0:
                    continue
                for _ in range(count):
                    share.popitem(last=False)
                excess -= count
                if not share:
                    del self._shares[owner]
                elif getsizeof(share) > SHARE_BYTES + BLOCK_BYTES * len(share):
                    self._shares[owner] = OrderedDict(share)


def _level(sizes: Sequence[int], excess: int) -> int:
    """Return how much at least the largest of ``sizes`` keep, if they lose ``excess`` and become equally large.

    ``sizes`` are in descending order, and their sum is at least ``excess``.
    """
    level, total = 0, -excess
    for count, size in enumerate(sizes, 1):
        if level >= size:
            break
        total += size
        level = max(total // count, 0)
    return level


def _merged(new: Holders, old: Holders) -> Holders:
    return tuple(dict.fromkeys((*new, *old)))[:MAX_HOLDERS]
