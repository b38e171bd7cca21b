"""Weights from a GGUF file, dequantised one tensor at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ...model_files.errors import UnsupportedModel
from ...model_files.gguf_reader import GGUFFile, GGUFTensor
from ...model_files.rope_order import Order, row_order
from ...model_files.spec import ModelSpec
from ...model_files.tensor_names import Part, find_parts
from .base import Stored, WeightSource, as_ours

JOINED_BYTES = 1 << 16
"""Maximum bytes of rows that are dequantised as one row."""


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

    def __init__(self, path: Path, spec: ModelSpec, left_out: Container[str] = ()) -> None:
        """Open the GGUF file at ``path`` as weights of ``spec``.

        ``left_out``: the engine's names of tensors that are not needed as floats. They are not dequantised.
        """
        self._file = GGUFFile(path)
        self._spec = spec
        self._left_out = left_out

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the file's tensors by the engine's names, dequantised one by one, except for those left out.

        Raises ``UnsupportedModel`` for a quantisation that the gguf package can't undo.
        """
        for name, tensor in self._file.tensors.items():
            parts = find_parts(self._spec, name)
            if parts and all(part.name in self._left_out for part in parts):
                continue
            stored = Stored(tensor.data.shape, partial(_read, tensor))
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


def _matrix(tensor: GGUFTensor, part: Part, order: Order | None) -> GGUFMatrix:
    data = tensor.data if part.expert is None else tensor.data[part.expert]
    rows = data[part.where]
    return GGUFMatrix(tensor.tensor_type, (len(rows), int(tensor.shape[0])), rows, order)


def _read(tensor: GGUFTensor, expert: int | None) -> Tensor:
    """Dequantise the tensor, or only the matrix ``expert`` of a stack, as a whole stack would be large.

    Raises ``UnsupportedModel``.
    """
    data = tensor.data if expert is None else tensor.data[expert]
    try:
        values = _dequantise(data, tensor.tensor_type)
    except NotImplementedError as e:
        raise UnsupportedModel(f"{tensor.name!r}: quantisation {tensor.tensor_type.name} is not supported") from e
    # Unquantised tensors are still the read-only file.
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _dequantise(data: npt.NDArray[Any], kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """Return the numbers of a matrix [N, ...]. Raises ``NotImplementedError`` for kinds that gguf can't dequantise.

    gguf takes 16 rows at a time. Rows that lie one after another are joined, so that each piece is large enough.
    """
    rows = np.asarray(data)  # slices of a ``memmap`` cost several times those of a plain array
    count, joined = len(rows), 1
    while rows.ndim == 2 and count % (2 * joined) == 0 and 2 * joined * rows[0].nbytes <= JOINED_BYTES:
        joined *= 2
    values: npt.NDArray[Any] = gguf.dequantize(rows.reshape(count // joined, -1) if joined > 1 else rows, kind)
    return values.reshape(count, -1) if joined > 1 else values
