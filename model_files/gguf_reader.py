"""Opens GGUF files quickly: metadata that describes the model, and tensors as they lie in the file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from .errors import InvalidWeights

LONG_ARRAY = 1024


class ModelGGUFReader(GGUFReader):  # type: ignore[misc]  # the gguf package is not typed strictly
    """A ``GGUFReader`` that steps over long arrays, which hold the vocabulary: 3 s of its 3.2 s for SmolLM2.

    ``contents()`` of such a field is empty. Should a later gguf package read arrays by another method, this class
    changes nothing but loses its speed.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY:
            item_type, length = struct.unpack_from("<IQ", self.data, orig_offs)
            if self.byte_order == "I" and length > LONG_ARRAY and item_type != GGUFValueType.ARRAY:
                return self._array_nbytes(orig_offs, item_type, length), [], [], [GGUFValueType.ARRAY]
        parts: tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]
        parts = super()._get_field_parts(orig_offs, raw_type)
        return parts

    def _array_nbytes(self, start: int, item_type: int, length: int) -> int:
        header = struct.calcsize("<IQ")
        if item_type != GGUFValueType.STRING:
            return header + length * int(np.dtype(self.gguf_scalar_to_np[GGUFValueType(item_type)]).itemsize)
        string_length, data = struct.Struct("<Q").unpack_from, self.data
        end = start + header
        for _ in range(length):
            end += 8 + string_length(data, end)[0]
        return int(end - start)


class GGUFFile:
    """A GGUF file: ``metadata`` (key → value; long arrays left out) and ``tensors`` by name."""

    def __init__(self, path: Path) -> None:
        try:
            reader = ModelGGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError, struct.error) as e:
            raise InvalidWeights(f"{path} is not a readable GGUF file: {e}") from e
        self.path = path
        self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        parts = self.metadata.get("split.count", 1)
        if parts > 1:
            raise InvalidWeights(
                f"{path} is one of {parts} parts of a GGUF file; join them with llama.cpp's llama-gguf-split --merge"
            )
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
