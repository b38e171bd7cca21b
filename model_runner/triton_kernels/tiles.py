"""Which tiles the attention kernels work in, and how they share the work out: pure functions, of what is known before
anything runs, so that they can be tried out and measured without the kernels, and overridden when they are.

A table has the choices for shapes that are common, by the elements of a row and the bytes of each, best first; what
does not fit the GPU's shared memory is passed over. The counts of bytes are upper bounds of what the compiler takes,
which the tests hold against it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .compile_check import SHARED_BYTES

I32 = npt.NDArray[np.int32]

MOST_SPLITS = 64
"""That any row is cut into: 64 splits of 8 KV heads keep every multiprocessor busy, and are few enough to be put
together at once."""


class KVShape(NamedTuple):
    """What of a KV pool and its queries decides the tiles. ``group``: heads that share a KV head. ``kv_bytes``: of an
    element of the pool, ``bytes``: of one of the queries'.
    """

    head_dim: int
    value_dim: int
    group: int
    kv_bytes: int
    bytes: int

    @property
    def is_latent(self) -> bool:
        """Whether a value is a part of its key."""
        return self.head_dim != self.value_dim


class DecodeTiles(NamedTuple):
    """Of ``paged_decode``. ``block_h`` heads meet ``block_n`` tokens at a time; ``least_split``: tokens of the smallest
    split; ``programs``: of a multiprocessor.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    least_split: int
    programs: int


class PrefillTiles(NamedTuple):
    """Of ``paged_prefill``: ``block_m`` rows (queries times heads) meet ``block_n`` tokens at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class _Choice(NamedTuple):
    """Tiles for rows of up to ``widest`` elements (padded to a power of two) of queries of ``bytes`` each."""

    widest: int
    bytes: int
    blocks: tuple[tuple[int, int, int, int], ...]
    """(rows at most, tokens, warps, stages)"""


_DECODE = (
    _Choice(64, 2, ((32, 128, 4, 3), (32, 64, 4, 3), (32, 32, 4, 2))),
    _Choice(128, 2, ((32, 64, 4, 3), (32, 32, 4, 3), (32, 32, 4, 2))),
    _Choice(256, 2, ((32, 32, 4, 3), (32, 32, 4, 2), (16, 16, 4, 2))),
    _Choice(1024, 2, ((64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2), (16, 16, 8, 1))),
    _Choice(64, 4, ((16, 32, 4, 3), (16, 32, 4, 2))),
    _Choice(128, 4, ((16, 32, 4, 3), (16, 32, 4, 2))),
    _Choice(256, 4, ((16, 16, 4, 2),)),
    _Choice(1024, 4, ((16, 16, 8, 1),)),
)
_PREFILL = (
    _Choice(64, 2, ((128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2))),
    _Choice(128, 2, ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 2))),
    _Choice(256, 2, ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2))),
    _Choice(1024, 2, ((64, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2), (16, 16, 8, 1))),
    _Choice(64, 4, ((32, 32, 4, 2),)),
    _Choice(128, 4, ((32, 32, 4, 2), (16, 32, 4, 2))),
    _Choice(256, 4, ((16, 16, 4, 2),)),
    _Choice(1024, 4, ((16, 16, 8, 1),)),
)


def decode_tiles(shape: KVShape, capability: int) -> DecodeTiles:
    """For ``capability`` (times ten: 90). Raises ``ValueError`` where no choice fits."""
    blocks = _choose(_DECODE, shape, capability)
    rows = min(max(16, _power(shape.group)), blocks[0])
    # What a split leaves behind, written and read, is to be a quarter of what it reads; 1024 tokens at most.
    kept = shape.group * shape.value_dim * 4 * 2
    read = shape.head_dim * shape.kv_bytes * (1 if shape.is_latent else 2)
    least = 256
    while least < 1024 and least * read < 4 * kept:
        least *= 2
    _, tokens, warps, stages = blocks
    taken = shared_bytes(shape, (rows, tokens, warps, stages))
    programs = max(1, min(2, SHARED_BYTES[_known(capability)] // taken))
    return DecodeTiles(rows, tokens, warps, stages, least, programs)


def prefill_tiles(shape: KVShape, capability: int) -> PrefillTiles:
    """For ``capability`` (times ten: 90). Raises ``ValueError`` where no choice fits."""
    return PrefillTiles(*_choose(_PREFILL, shape, capability))


def shared_bytes(shape: KVShape, blocks: tuple[int, int, int, int]) -> int:
    """At least what a program with these tiles takes of shared memory."""
    rows, tokens, _, stages = blocks
    padded = _padded(shape)
    streamed = (1 if shape.is_latent else 2) * padded
    # Elements of one byte are widened into a tile of their own; queries and weights pass through shared memory.
    in_pipeline = streamed * tokens * shape.kv_bytes * stages
    widened = 0 if shape.kv_bytes == shape.bytes else streamed * tokens * shape.bytes
    return in_pipeline + widened + rows * (padded + tokens) * shape.bytes + 4096


def split_tokens(length: int, least: int, most: int = MOST_SPLITS) -> int:
    """Tokens of each split of a row that sees ``length``: ``least``, doubled until there are ``most`` at most.

    Of nothing but the length: a row is cut the same in any company.
    """
    tokens = least
    while -(-length // tokens) > most:
        tokens *= 2
    return tokens


def most_splits(length: int, least: int) -> int:
    """Of any row that sees ``length`` tokens or fewer."""
    return min(MOST_SPLITS, -(-length // least))


def prefill_tile_list(q_lens: npt.NDArray[np.int64], kv_lens: npt.NDArray[np.int64], queries: int) -> I32:
    """[tiles, 2]: entry and first query of tiles of so many ``queries``, those that see most first."""
    counts = -(-q_lens // queries)
    entries = np.repeat(np.arange(len(q_lens)), counts)
    firsts = (np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    seen = (kv_lens - q_lens)[entries] + firsts
    order = np.argsort(-seen, kind="stable")
    return np.stack((entries, firsts), 1)[order].astype(np.int32)


def _choose(table: tuple[_Choice, ...], shape: KVShape, capability: int) -> tuple[int, int, int, int]:
    room, widest = SHARED_BYTES[_known(capability)], _padded(shape)
    for choice in table:
        if choice.bytes == shape.bytes and widest <= choice.widest:
            for blocks in choice.blocks:
                if shared_bytes(shape, blocks) <= room:
                    return blocks
    raise ValueError(
        f"no tiles for rows of {shape.head_dim} elements of {shape.bytes} bytes in {room} bytes of shared memory"
    )


def _padded(shape: KVShape) -> int:
    rest = shape.head_dim - shape.value_dim
    return max(16, _power(shape.value_dim)) + (max(16, _power(rest)) if rest else 0)


def _known(capability: int) -> int:
    """The capability whose memory is known that comes next below."""
    return max((known for known in SHARED_BYTES if known <= capability), default=min(SHARED_BYTES))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
