"""Walks the header of a GGUF file: its metadata and the places of its tensors.

Every count and length in a file may be wrong. None is trusted before the bytes that it promises are known to be there.
So the work is bounded by the size of the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
FIXED_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format of ``struct`` by GGUF value type. Strings and arrays have lengths of their own."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
ADVICE = "Download or convert it again"
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


class BrokenGGUF(Exception):
    """The file is no GGUF file, or a damaged one; the message says where."""


class TensorPlace(NamedTuple):
    """``kind``: number of the quantisation. ``shape``: the fastest dimension first. ``offset`` counts from the data."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


class GGUFMetadataPairs(NamedTuple):
    """Key-value pairs, which end before byte ``end``. ``lengths``: numbers of elements of arrays, also empty ones."""

    values: dict[str, Value]
    lengths: dict[str, int]
    end: int


class GGUFHeader(NamedTuple):
    """Everything before the data of tensors, which begins at byte ``data_start``."""

    metadata: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: list[TensorPlace]
    alignment: int
    data_start: int


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory for reading. Errors of the block are raised as a ``BrokenGGUF`` that names the file.

    The mapping stays valid after the block while something refers to it.
    """
    try:
        with path.open("rb") as file:
            yield mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, struct.error, ValueError, IndexError, BrokenGGUF) as e:
        raise BrokenGGUF(f"{path} can't be read as GGUF: {e}. {ADVICE}") from e


def read_metadata(data: mmap.mmap, longest: int | None = None) -> GGUFMetadataPairs:
    """Read all key-value pairs at the beginning of a GGUF file. Raises ``BrokenGGUF``.

    Arrays of more than ``longest`` elements are skipped and left empty. None: all are read.
    """
    if data[:4] != MAGIC:
        raise BrokenGGUF("it does not begin with GGUF")
    (version,) = _u32(data, 4)
    if version not in VERSIONS:
        raise BrokenGGUF(f"it has GGUF version {version}, and versions 2 and 3 (little-endian) are supported")
    (pairs,) = _u64(data, 16)
    position = 24
    values: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(pairs):
        key, position = _read_string(data, position)
        if key in values:
            raise BrokenGGUF(f"it has the key {key!r} twice")
        try:
            (kind,) = _u32(data, position)
            if kind == ARRAY:
                (lengths[key],) = _u64(data, position + 8)
            values[key], position = _read_value(data, position + 4, kind, longest)
        except (struct.error, ValueError) as e:
            raise BrokenGGUF(f"metadata {key!r}: {e}") from e
    return GGUFMetadataPairs(values, lengths, position)


def read_header(data: mmap.mmap, longest: int) -> GGUFHeader:
    """Read a GGUF file's key-value pairs and the places of its tensors. Raises ``BrokenGGUF``.

    Arrays of more than ``longest`` elements are skipped and left empty.
    """
    metadata, lengths, position = read_metadata(data, longest)
    (count,) = _u64(data, 8)
    tensors: dict[str, TensorPlace] = {}
    for _ in range(count):
        name, position = _read_string(data, position)
        if name in tensors:
            raise BrokenGGUF(f"it has the tensor {name!r} twice")
        (dimensions,) = _u32(data, position)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise BrokenGGUF(f"tensor {name!r} has {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}Q", data, position + 4)
        position += 4 + 8 * dimensions
        kind, offset = struct.unpack_from("<IQ", data, position)
        position += 12
        tensors[name] = TensorPlace(name, kind, shape, offset)
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise BrokenGGUF(f"metadata {ALIGNMENT_KEY!r} is {str(alignment)[:40]}, and should be a power of two")
    return GGUFHeader(metadata, lengths, list(tensors.values()), alignment, aligned(position, alignment))


def aligned(position: int, alignment: int) -> int:
    """Return the least multiple of ``alignment`` that is not below ``position``."""
    return -(-position // alignment) * alignment


def _read_string(data: mmap.mmap, position: int) -> tuple[str, int]:
    start = position + 8
    end = start + _u64(data, position)[0]
    if end > len(data):
        raise BrokenGGUF(f"a string at byte {position} reaches beyond the end of the file")
    return data[start:end].decode(), end


def _read_value(data: mmap.mmap, position: int, kind: int, longest: int | None) -> tuple[Value, int]:
    if kind == STRING:
        return _read_string(data, position)
    if kind != ARRAY:
        values, end = _read_numbers(data, position, kind, 1)
        return values[0], end
    element, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if element != STRING:
        return _read_numbers(data, position, element, count, is_read=longest is None or count <= longest)
    if longest is not None and count > longest:
        return [], _behind_strings(data, position, count)
    strings: list[Scalar] = []
    for _ in range(count):
        text, position = _read_string(data, position)
        strings.append(text)
    return strings, position


def _behind_strings(data: mmap.mmap, position: int, count: int) -> int:
    """Return the position after the ``count`` strings that begin at ``position``, without reading them."""
    for _ in range(count):
        position += 8 + _u64(data, position)[0]
    if position > len(data):
        raise BrokenGGUF("a string reaches beyond the end of the file")
    return position


def _read_numbers(
    data: mmap.mmap, position: int, kind: int, count: int, *, is_read: bool = True
) -> tuple[list[Scalar], int]:
    if kind not in FIXED_TYPES:
        raise BrokenGGUF(f"value type {kind} is unknown")
    end = position + count * struct.calcsize(f"<{FIXED_TYPES[kind]}")
    if end > len(data):
        raise BrokenGGUF(f"{count} values reach beyond the end of the file")
    return list(struct.unpack_from(f"<{count}{FIXED_TYPES[kind]}", data, position)) if is_read else [], end
