"""Table of the instances that computed prompts last, by the hashes of their blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

MAX_HOLDERS = 8
"""Maximum number of instances that a block has."""

Holders = tuple[int, ...]
"""Numbers of instances, the last one first."""


class PrefixMatch(NamedTuple):
    """The longest known prefix of a prompt."""

    blocks: int
    """Its length in blocks; 0 if no block is known."""
    holders: list[int]
    """The instances that computed it last."""


class PrefixTable:
    """LRU table of blocks. It holds at most ``capacity`` of them.

    A block's hash covers all blocks before it (``Facts.blocks``). All blocks of a prompt are used together, its end
    first, so the end of a prompt is dropped before its beginning.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, Holders] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, blocks: Sequence[int], among: Container[int]) -> PrefixMatch:
        """Return the longest prefix of ``blocks`` that instances in ``among`` computed. The table stays as it is."""
        get = self._holders.get
        for count in range(len(blocks), 0, -1):
            known = get(blocks[count - 1])
            if known is not None and (holders := [number for number in known if number in among]):
                return PrefixMatch(count, holders)
        return PrefixMatch(0, [])

    def record(self, blocks: Sequence[int], holders: Holders) -> None:
        """Note that the instances ``holders`` are given a prompt with these ``blocks``.

        Blocks with the same holders share one tuple, which saves most of the memory.
        """
        table, merged = self._holders, dict[Holders, Holders]()
        for block in reversed(blocks):
            before = table.get(block, ())
            after = merged.get(before)
            if after is None:
                after = merged[before] = _merged(holders, before)
            table[block] = after
            table.move_to_end(block)
        while len(table) > self._capacity:
            table.popitem(last=False)


def _merged(new: Holders, old: Holders) -> Holders:
    return tuple(dict.fromkeys((*new, *old)))[:MAX_HOLDERS]
