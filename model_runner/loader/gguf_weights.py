"""Weights from a GGUF file, dequantised one tensor at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from ...model_files.errors import UnsupportedModel
from ...model_files.gguf_reader import GGUFFile, GGUFTensor
from ...model_files.rope_order import Order, row_order
from ...model_files.spec import ModelSpec
from ...model_files.tensor_names import Part, find_parts
from .arrays import FLOAT32, Array
from .base import Stored, WeightSource, as_ours
from .dequantise import Dequantise, dequantise


class GGUFMatrix(NamedTuple):
    """``shape``: [N, K] of the weights. ``rows``: [N, …], a row's blocks one after another, or plain numbers.

    ``order``: which of the rows comes where in ours; None: they lie in our order.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, int]
    rows: npt.NDArray[Any]
    order: Order | None

    @property
    def ordered_rows(self) -> npt.NDArray[Any]:
        """The matrix's rows as stored, but in the engine's order; a copy if that differs from the file's."""
        return self.rows if self.order is None else self.rows[self.order]


class GGUFWeights(WeightSource):
    """The tensors of a GGUF file by our names."""

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        left_out: Container[str] = (),
        types: Mapping[str, np.dtype[Any]] = {},
        dequantise: Dequantise = dequantise,
    ) -> None:
        """Open the GGUF file at ``path`` as weights of ``spec``.

        ``left_out``: the engine's names of tensors that are not needed as floats. They are not dequantised. ``types``:
        those that weights are rounded to afterwards, by the engine's names. Quantised ones are dequantised to them at
        once; those without a type there to float32.
        """
        self._file = GGUFFile(path)
        self._spec = spec
        self._left_out = left_out
        self._types = types
        self._dequantise = dequantise

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield the file's tensors by the engine's names, dequantised one by one, except for those left out.

        Raises ``UnsupportedModel`` for a quantisation that can't be undone.
        """
        for name, tensor in self._file.tensors.items():
            parts = find_parts(self._spec, name)
            if parts and all(part.name in self._left_out for part in parts):
                continue
            types = {self._types.get(part.name, FLOAT32) for part in parts}
            read = partial(self._read, tensor, types.pop() if len(types) == 1 else FLOAT32)
            stored = Stored(tensor.data.shape, read)
            for ours, part in as_ours(self._spec, name, stored):
                if ours not in self._left_out:
                    yield ours, part

    def matrices(self) -> dict[str, GGUFMatrix]:
        """Return all matrices by the engine's names, still quantised, as views of the mapped file.

        Each matrix of a stack of experts is one of its own.
        """
        return {
            part.name: _matrix(tensor, part, row_order(self._spec, part.name))
            for name, tensor in self._file.tensors.items()
            for part in find_parts(self._spec, name) or (Part(name),)
            if len(tensor.shape) == (2 if part.expert is None else 3)
        }

    def _read(self, tensor: GGUFTensor, dtype: np.dtype[Any], expert: int | None) -> Array:
        """Dequantise the tensor to ``dtype``, or only the matrix ``expert`` of a stack, as a stack would be large.

        Raises ``UnsupportedModel``.
        """
        data = tensor.data if expert is None else tensor.data[expert]
        try:
            return self._dequantise(data, tensor.tensor_type, dtype)
        except NotImplementedError as e:
            raise UnsupportedModel(f"{tensor.name!r}: quantisation {tensor.tensor_type.name} is not supported") from e


def _matrix(tensor: GGUFTensor, part: Part, order: Order | None) -> GGUFMatrix:
    data = tensor.data if part.expert is None else tensor.data[part.expert]
    rows = data[part.where]
    return GGUFMatrix(tensor.tensor_type, (len(rows), int(tensor.shape[0])), rows, order)
