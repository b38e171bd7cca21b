"""A model's weights, packed for the CPU kernels, in one file.

The engine multiplies with the weights where the file is mapped: instances on one host share its memory. The layout:

- The header has a magic, a version, where the contents begin and end, and a digest of all that follows.
- Each weight begins at a multiple of 64 bytes. Zeros are between them.
- The contents are a ``Contents`` as MessagePack.

The header is written last, so a file that is not finished has none. Does not import torch.
"""

from __future__ import annotations

import os
import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..loader.quantization import Quantization, QuantizedActivations
from .weight_memory import CHUNK, WeightMemory

FORMAT = 1
"""Version of the layout, and of ``Contents``."""
MAGIC = b"pdserve weights\n"
HEADER = struct.Struct("<16sQQQ16s")
"""Magic, version, where the contents begin and end, XXH3-128 of the weights and the contents."""
BODY = 4096
"""Where the weights begin: a page."""
ALIGNMENT = 64


class DamagedWeights(Exception):
    """A file is not the packed model that was asked for; the message says why."""


class PackedLinear(msgspec.Struct, frozen=True, array_like=True):
    """A weight of a linear layer. Places are offsets in the file."""

    kind: int
    layer: int
    expert: int
    parts: list[tuple[int, int]]
    """Rows and ``Format`` of each part."""
    panels: int
    bias: int
    """Place of the bias; 0: the layer has none."""


class PackedVector(msgspec.Struct, frozen=True, array_like=True):
    """A norm, or another vector of float32. ``values`` is its place in the file."""

    kind: int
    layer: int
    values: int


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a packed model consists of. Places are offsets in the file."""

    key: str
    """Key of everything that the weights depend on; see ``WeightsName``."""
    source: str
    """Path of the model's files."""
    fingerprint: str
    """Fingerprint of the whole model, also on a rank."""
    quantization: Quantization
    activations: QuantizedActivations | None
    """Type that activations are rounded to; None: they stay as they are."""
    step_bytes: int
    """Bytes of the linear layers' weights that a decode step of one token reads."""
    linears: list[PackedLinear]
    norms: list[PackedVector]
    vectors: list[PackedVector]
    embedding: int
    """Place of the table of embeddings; 0: the head is the same, and the engine reads rows from its panels."""
    ropes: list[tuple[int, int]]
    """Cosines and sines of each rope, [positions, head_dim / 2] float32."""
    positions: int


class MemoryOfWeights(NamedTuple):
    """Bytes of memory that a packed model takes."""

    total: int
    page_cache: int
    """Bytes that the kernel counts as available, because it could read them from the disk again. 0: it keeps them."""


class PackedModel:
    """A packed model in memory, which lives as long as this object."""

    def __init__(self, memory: WeightMemory, key: str) -> None:
        """Check the whole file in ``memory`` by its digest, and decode its contents.

        ``key``: the key that its contents must name, so that they belong to the model that is asked for. Raises
        ``DamagedWeights``.
        """
        self._mapped = memory
        self.memory = MemoryOfWeights(len(memory.data), memory.page_cache)
        self.contents = self._check(key)
        """What the model consists of."""

    def address(self, place: int) -> int:
        """Return the address in this process's memory of the byte at ``place``, an offset in the packed file."""
        return self._mapped.address + place

    def _check(self, key: str) -> Contents:
        data = self._mapped.data
        begin, end, digest = read_header(data[: HEADER.size].tobytes(), len(data))
        if xxhash.xxh3_128_digest(data[BODY:].data) != digest:
            raise DamagedWeights("its bytes have changed since it was written")
        contents = decode_contents(data[begin:end].tobytes())
        if contents.key != key:
            raise DamagedWeights("it belongs to another model")
        return contents


class Header(NamedTuple):
    """Where the contents begin and end, and the digest of all that follows the header's page."""

    begin: int
    end: int
    digest: bytes


def read_header(data: bytes, size: int) -> Header:
    """Decode the header in ``data``, the first bytes of a file of ``size`` bytes, and check its offsets.

    Raises ``DamagedWeights`` if it is none of this version, or names another size.
    """
    if len(data) < HEADER.size:
        raise DamagedWeights(f"it has {size} bytes and no header")
    magic, version, *rest = HEADER.unpack(data)
    header = Header(*rest)
    if magic != MAGIC or version != FORMAT:
        raise DamagedWeights("its header is not that of packed weights of this version")
    if header.end != size or not BODY <= header.begin <= header.end:
        raise DamagedWeights(f"it has {size} bytes instead of {header.end}")
    return header


def decode_contents(data: bytes) -> Contents:
    """Decode the ``Contents`` of a packed model from MessagePack. Raises ``DamagedWeights``."""
    try:
        return msgspec.msgpack.decode(data, type=Contents)
    except msgspec.MsgspecError as e:
        raise DamagedWeights(f"its contents can't be read: {e}") from e


def read_contents(fd: int) -> Contents:
    """Read the ``Contents`` of the packed model in the open file ``fd``. Neither reads weights nor checks the digest.

    Raises ``DamagedWeights``.
    """
    begin, end, _ = read_header(os.pread(fd, HEADER.size, 0), os.fstat(fd).st_size)
    return decode_contents(os.pread(fd, end - begin, begin))


class PackedModelWriter:
    """Writes a packed model to the open, empty file ``fd``. Raises ``OSError``.

    Writes by calls and not through a mapping, so that a full disk is an error and not a signal. Writes whole chunks, so
    that the page cache has huge pages.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # One buffer for all chunks: a new one would be cleared, page by page, each time.
        self._chunk = memoryview(bytearray(CHUNK))
        # The place of the header stays empty until all the rest is there.
        self._filled = BODY
        self._written = 0
        self._digest = xxhash.xxh3_128()

    @property
    def _end(self) -> int:
        return self._written + self._filled

    def add(self, values: npt.NDArray[Any]) -> int:
        """Append an array to the file, padded to the alignment, and return its offset there."""
        place = self._end
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._append(flat.data)
        self._append(memoryview(bytes(-self._end % ALIGNMENT)))
        return place

    def finish(self, contents: Contents) -> None:
        """Append ``contents``, then write the header, which makes the file a complete packed model."""
        begin = self._end
        self._append(memoryview(msgspec.msgpack.encode(contents)))
        self._flush()
        header = HEADER.pack(MAGIC, FORMAT, begin, self._end, self._digest.digest())
        os.pwrite(self._fd, header, 0)

    def _append(self, data: memoryview) -> None:
        self._digest.update(data)
        while data:
            taken = data[: len(self._chunk) - self._filled]
            self._chunk[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == len(self._chunk):
                self._flush()

    def _flush(self) -> None:
        rest = self._chunk[: self._filled]
        while rest:
            count = os.pwrite(self._fd, rest, self._written)
            self._written += count
            rest = rest[count:]
        self._filled = 0
