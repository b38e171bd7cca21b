"""Opens GGUF files: metadata that describes the model, and tensors as they lie in the file.

``gguf.GGUFReader`` makes numpy views of every element of every array, which takes seconds for a vocabulary. It also
believes what a damaged file says of its tensors.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quant_shape_to_byte_shape

from .errors import InvalidWeights
from .gguf_layout import BrokenGGUF, GGUFHeader, TensorPlace, Value, aligned, mapped, read_header

LONG_ARRAY = 1024
"""Elements from which on an array is the vocabulary's, which describes no model."""
MAX_PADDING = 1 << 20
"""Bytes after the last tensor from which on they can't be padding. Padding is zero."""
PLAIN_TYPES: dict[GGMLQuantizationType, type[np.generic]] = {
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I16: np.int16,
    GGMLQuantizationType.I32: np.int32,
    GGMLQuantizationType.I64: np.int64,
}
"""Types of numpy by quantisation. Others are bytes."""


class GGUFTensor(NamedTuple):
    """A tensor in a mapped file. ``shape``: the fastest dimension first. ``data``: rows of numbers, or of bytes."""

    name: str
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    n_elements: int
    n_bytes: int
    data: npt.NDArray[Any]


class GGUFFile:
    """A GGUF file: ``metadata`` (key → value; long arrays left empty) and ``tensors`` by name.

    ``vocabulary_size``: number of tokens that the metadata list.
    """

    def __init__(self, path: Path) -> None:
        """Map the file at ``path`` and read its header.

        Raises ``InvalidWeights``, also for one part of a divided file.
        """
        self.path = path
        try:
            with mapped(path) as data:
                header = read_header(data, LONG_ARRAY)
                self.metadata: dict[str, Value] = header.metadata
                self.tensors = _tensors(header, data)
                self.vocabulary_size = header.array_lengths.get("tokenizer.ggml.tokens", 0)
        except BrokenGGUF as e:
            raise InvalidWeights(str(e)) from e
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise InvalidWeights(
                f"{path} is one of {parts} parts of a GGUF file; join them with llama.cpp's llama-gguf-split --merge"
            )


def _tensors(header: GGUFHeader, data: mmap.mmap) -> dict[str, GGUFTensor]:
    """Return the file's tensors by name, as views of the mapped file.

    Raises ``BrokenGGUF`` unless each begins at the next aligned byte after the one before, as in llama.cpp. So tensors
    can neither overlap nor leave a gap.
    """
    tensors = {}
    expected = end = 0
    for place in header.tensors:
        if place.offset != expected:
            raise BrokenGGUF(f"tensor {place.name!r} lies at byte {place.offset} of the data, expected {expected}")
        tensor = _tensor(place, header.data_start + place.offset, data)
        tensors[place.name] = tensor
        end = place.offset + tensor.n_bytes
        expected = aligned(end, header.alignment)
    _check_end(data, header.data_start + end, header.data_start + expected)
    return tensors


def _check_end(data: mmap.mmap, end: int, padded: int) -> None:
    """Raise ``BrokenGGUF`` unless the file ends right after the last tensor or after zeros that pad it.

    ``end``: byte at which the last tensor ends. ``padded``: byte that padding must reach, if there is any. A file that
    ends elsewhere has its tensors elsewhere than the header says.
    """
    rest = data[end : end + MAX_PADDING]
    if len(rest) == MAX_PADDING or rest.strip(b"\0") or end < len(data) < padded:
        raise BrokenGGUF(f"the last tensor ends at byte {end}, the file at byte {len(data)}")


def _tensor(place: TensorPlace, start: int, data: mmap.mmap) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(place.kind)
    except ValueError:
        raise BrokenGGUF(f"tensor {place.name!r} is of type {place.kind}, which is unknown") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if place.shape[0] % block:
        raise BrokenGGUF(f"tensor {place.name!r} has rows of {place.shape[0]} numbers, no multiple of {block}")
    count = math.prod(place.shape)
    n_bytes = count // block * block_bytes
    if start + n_bytes > len(data):
        raise BrokenGGUF(f"tensor {place.name!r} ends at byte {start + n_bytes}, the file at byte {len(data)}")
    plain = PLAIN_TYPES.get(kind)
    rows = tuple(reversed(place.shape))
    shape = quant_shape_to_byte_shape(rows, kind) if plain is None else rows
    numbers = np.dtype(plain or np.uint8)
    values = np.frombuffer(data, numbers, n_bytes // numbers.itemsize, start).reshape(shape)
    return GGUFTensor(place.name, kind, place.shape, count, n_bytes, values)
