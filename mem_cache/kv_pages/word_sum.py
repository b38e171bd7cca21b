"""A checksum of pages that a device computes where they lie, and a host too.

xxh3 of a slice is a chain over its bytes, which a device's thousands of programs can't share. This checksum is a sum,
modulo 2^64, of one mixed word for each 8 bytes of the slice. The mixer is splitmix64's, applied to the word plus its
index times the golden ratio. A sum has no order, so programs and pages divide it as they like.

What it detects:
- every change within one aligned word: the mixer is one to one, so one term differs;
- other changes, unless their differences cancel out modulo 2^64. That has a probability of 1 in 2^64. Examples are
  swapped or shifted words, pages in another order, and several wrong words.

It protects against faults of memory and transport, as xxh3 does, and not against a deliberate forgery.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...runtime.splitmix import GOLDEN, mix

WORD_BYTES = 8
_BATCH = 1 << 16


def host_checksum(data: npt.NDArray[np.uint8], first_word: int = 0) -> int:
    """Return the checksum of contiguous bytes of a slice, a multiple of 8; ``first_word``: index of their first word in
    it.

    The checksums of a slice's parts are added modulo 2^64.
    """
    words = data.view(np.uint64)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for begin in range(0, len(words), _BATCH):
            part = words[begin : begin + _BATCH]
            places = np.arange(first_word + begin + 1, first_word + begin + 1 + len(part), dtype=np.uint64)
            total += mix(part + places * GOLDEN).sum(dtype=np.uint64)
    return int(total)


class WordSum:
    """The checksum of a slice that arrives in parts, with the interface of a hasher of ``xxhash``."""

    def __init__(self) -> None:
        self._total = 0
        self._words = 0
        self._rest = b""
        """Bytes of a word that is incomplete so far."""

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the slice, any number of them."""
        whole = np.frombuffer(self._rest + bytes(data) if self._rest else data, dtype=np.uint8)
        end = len(whole) // WORD_BYTES * WORD_BYTES
        self._rest = whole[end:].tobytes()
        # Where a part begins at no whole word, the processor reads words all the same.
        self._total += host_checksum(np.ascontiguousarray(whole[:end]), self._words)
        self._words += end // WORD_BYTES

    def intdigest(self) -> int:
        """Return the checksum of all bytes so far, 64 bits. The last word is filled up with zeros."""
        rest = np.frombuffer(self._rest.ljust(WORD_BYTES, b"\0") if self._rest else b"", dtype=np.uint8)
        return (self._total + host_checksum(rest, self._words)) % 2**64
