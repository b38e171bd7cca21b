"""Choice of the attention kernels' tiles, and of how they divide the work.

These are pure functions of what is known before anything runs. So they can be tested and measured without the kernels,
and overridden when the kernels run.

A table has the choices for common shapes, by the elements of a row and the bytes of each, best first. Choices that do
not fit the GPU's shared memory are skipped. The counts of bytes are upper bounds of what the compiler takes, which the
tests compare with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...device.triton_compiler import SHARED_BYTES

I32 = npt.NDArray[np.int32]

MOST_SPLITS = 64
"""Maximum splits of a row.

Sixty-four splits of 8 KV heads keep every multiprocessor busy, and are few enough to be combined at once.
"""


class TileShape(NamedTuple):
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
        """Whether KV is latent rows, in which a value is a part of its key."""
        return self.head_dim != self.value_dim


class DecodeTiles(NamedTuple):
    """Tiles of ``paged_decode``. ``block_h`` heads meet ``block_n`` tokens at a time.

    ``least_split``: tokens of the smallest split. ``programs``: programs for each multiprocessor.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    least_split: int
    programs: int


class PrefillTiles(NamedTuple):
    """Tiles of ``paged_prefill``: ``block_m`` rows (queries times heads) meet ``block_n`` tokens at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class _Choice(NamedTuple):
    """Tiles for rows of up to ``widest`` elements (padded to powers of two), with queries of ``bytes`` each.

    The pool's elements are of one byte (``is_narrow``) or more. The GPU has at least ``capability``.
    """

    capability: int
    widest: int
    bytes: int
    is_narrow: bool
    blocks: tuple[tuple[int, int, int, int], ...]
    """(rows at most, tokens, warps, stages)"""


# With 128 elements of two bytes: 2 buffers of 32 KiB, three programs on a multiprocessor of an H100. With one byte:
# copies of 4 bytes, as a head's scale puts the next one off its alignment. That takes one more warp for the addresses.
_DECODE = (
    _Choice(0, 64, 2, False, ((32, 128, 4, 5), (32, 64, 4, 5))),
    _Choice(0, 128, 2, False, ((32, 64, 4, 5), (32, 32, 4, 5))),
    _Choice(0, 256, 2, False, ((32, 32, 8, 5), (32, 32, 8, 3))),
    _Choice(0, 1024, 2, False, ((32, 32, 8, 5), (32, 32, 8, 3), (16, 32, 8, 3))),
    _Choice(0, 64, 2, True, ((32, 64, 4, 5),)),
    _Choice(90, 128, 2, True, ((32, 64, 8, 7),)),
    _Choice(0, 256, 2, True, ((32, 32, 8, 5),)),
    _Choice(0, 128, 4, False, ((16, 32, 8, 5), (16, 32, 8, 3))),
    _Choice(0, 1024, 4, False, ((16, 16, 8, 1),)),
    _Choice(0, 256, 4, True, ((16, 16, 8, 3),)),
)
# From capability 9.0 on by wgmma, which leaves room for wider tiles; float32 is multiplied without tensor cores, and
# runs out of registers first.
_PREFILL = (
    _Choice(100, 64, 2, False, ((128, 64, 8, 5),)),
    _Choice(90, 64, 2, False, ((128, 128, 8, 5),)),
    _Choice(90, 128, 2, False, ((128, 64, 8, 5),)),
    _Choice(90, 128, 2, True, ((128, 64, 8, 5),)),
    _Choice(0, 64, 2, False, ((128, 64, 8, 5),)),
    _Choice(0, 128, 2, False, ((64, 64, 8, 5), (64, 32, 4, 5))),
    _Choice(0, 256, 2, False, ((64, 32, 8, 5), (64, 32, 8, 3))),
    _Choice(0, 1024, 2, False, ((32, 32, 8, 3), (16, 32, 8, 3))),
    _Choice(0, 64, 2, True, ((128, 64, 8, 5),)),
    _Choice(0, 128, 2, True, ((64, 64, 8, 5),)),
    _Choice(0, 256, 2, True, ((64, 32, 8, 5), (32, 32, 8, 3))),
    _Choice(0, 64, 4, False, ((16, 32, 8, 5),)),
    _Choice(0, 128, 4, False, ((16, 16, 8, 5), (16, 16, 8, 3))),
    _Choice(0, 1024, 4, False, ((16, 16, 8, 1),)),
    _Choice(0, 256, 4, True, ((16, 16, 8, 3),)),
)
REGISTERS = 65536
"""Registers of a multiprocessor."""
REGISTERS_OF_A_WARP = 168 * 32
"""What the decode kernels take, about."""


def decode_tiles(shape: TileShape, capability: int) -> DecodeTiles:
    """Choose the decode kernel's tiles for a GPU of ``capability`` (compute capability times ten, such as 90).

    Raises ``ValueError`` if no choice fits the GPU's shared memory.
    """
    blocks = _choose(_DECODE, shape, capability, 1)
    rows = min(max(16, _power(shape.group)), blocks[0])
    # What a split leaves behind, written and read, is to be a quarter of what it reads; 1024 tokens at most.
    kept = shape.group * shape.value_dim * 4 * 2
    read = shape.head_dim * shape.kv_bytes * (1 if shape.is_latent else 2)
    least = 256
    while least < 1024 and least * read < 4 * kept:
        least *= 2
    _, tokens, warps, stages = blocks
    taken = shared_bytes(shape, (rows, tokens, warps, stages))
    programs = min(SHARED_BYTES[_known(capability)] // taken, REGISTERS // (REGISTERS_OF_A_WARP * warps))
    return DecodeTiles(rows, tokens, warps, stages, least, max(1, programs))


def prefill_tiles(shape: TileShape, capability: int) -> PrefillTiles:
    """Choose the prefill kernel's tiles for a GPU of ``capability`` (compute capability times ten, such as 90).

    Raises ``ValueError`` if no choice fits the GPU's shared memory.
    """
    return PrefillTiles(*_choose(_PREFILL, shape, capability, 2))


def shared_bytes(shape: TileShape, blocks: tuple[int, int, int, int], loops: int = 1) -> int:
    """Return an upper bound of the shared memory that a program takes with these tiles, in bytes.

    ``blocks``: rows of queries, tokens of KV, warps and pipeline stages. ``loops``: loops over a row's KV in the
    kernel. A token's page is looked up first and takes half of the stages, which leaves the other half to the copies of
    keys and values.
    """
    rows, tokens, _, stages = blocks
    padded = _padded(shape)
    streamed = (1 if shape.is_latent else 2) * padded * tokens
    buffers = max(1, (stages - 1) // 2) + loops - 1
    widened = 0 if shape.kv_bytes == shape.bytes else streamed * shape.bytes
    # Queries and weights pass through it, too, and what warps tell each other.
    return streamed * shape.kv_bytes * buffers + widened + rows * (padded + tokens) * shape.bytes + 4096


def split_tokens(length: int, least: int, most: int = MOST_SPLITS) -> int:
    """Return how many tokens each split has, for a row that sees ``length`` tokens.

    It is ``least`` tokens, doubled until the row has at most ``most`` splits. It depends on the row's length alone, not
    on the batch.
    """
    tokens = least
    while -(-length // tokens) > most:
        tokens *= 2
    return tokens


def most_splits(length: int, least: int) -> int:
    """Return the maximum splits of a row that sees up to ``length`` tokens, if no split is below ``least``."""
    return min(MOST_SPLITS, -(-length // least))


def prefill_tile_list(q_lens: npt.NDArray[np.int64], kv_lens: npt.NDArray[np.int64], queries: int) -> I32:
    """Divide entries into tiles of ``queries`` tokens: [tiles, 2] int32, entry and first query.

    Tiles that see most tokens come first. ``q_lens``, ``kv_lens``: each entry's own tokens, and all that its last one
    sees.
    """
    counts = -(-q_lens // queries)
    entries = np.repeat(np.arange(len(q_lens)), counts)
    firsts = (np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    seen = (kv_lens - q_lens)[entries] + firsts
    order = np.argsort(-seen, kind="stable")
    return np.stack((entries, firsts), 1)[order].astype(np.int32)


def _choose(table: tuple[_Choice, ...], shape: TileShape, capability: int, loops: int) -> tuple[int, int, int, int]:
    room, widest, is_narrow = SHARED_BYTES[_known(capability)], _padded(shape), shape.kv_bytes == 1
    for choice in table:
        fits = capability >= choice.capability and widest <= choice.widest
        if fits and choice.bytes == shape.bytes and choice.is_narrow == is_narrow:
            for blocks in choice.blocks:
                if shared_bytes(shape, blocks, loops) <= room:
                    return blocks
    raise ValueError(
        f"no tiles for rows of {shape.head_dim} elements of {shape.kv_bytes} bytes and queries of {shape.bytes}, "
        f"in {room} bytes of shared memory"
    )


def _padded(shape: TileShape) -> int:
    rest = shape.head_dim - shape.value_dim
    return max(16, _power(shape.value_dim)) + (max(16, _power(rest)) if rest else 0)


def _known(capability: int) -> int:
    """Return the highest compute capability of ``SHARED_BYTES`` up to ``capability``, or else its lowest one."""
    return max((known for known in SHARED_BYTES if known <= capability), default=min(SHARED_BYTES))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
