"""Gives a compiled engine weights that a test holds as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.model_runner.cpu_engine.native_engine import NativeEngine, NormKind, VectorKind
from pdserve.model_runner.cpu_engine.rope_tables import RopeRows, RopeTables
from pdserve.model_runner.cpu_engine.structs import WeightPart
from pdserve.model_runner.cpu_engine.weight_packer import LinearKind, LinearPlace, WeightPacker


class NativeWeights:
    """Packs weights for ``engine`` with ``packer``, and keeps them as long as the engine reads them."""

    def __init__(self, engine: NativeEngine, packer: WeightPacker) -> None:
        self._engine = engine
        self._packer = packer
        self._kept: list[npt.NDArray[Any]] = []

    def set_linear(
        self, kind: LinearKind, layer: int, parts: Sequence[WeightPart], bias: Tensor | None, expert: int = 0
    ) -> None:
        """Pack a weight [N, K] of parts that lie below each other; ``bias`` is [N]."""
        place = LinearPlace(kind, layer, expert)
        packed = self._packer.pack(place, parts, None if bias is None else bias.float().contiguous().numpy())
        address = None if packed.bias is None else self._keep(packed.bias)
        self._engine.set_linear(place, parts, self._keep(packed.panels), address)

    def set_norm(self, kind: NormKind, layer: int, weight: Tensor) -> None:
        """Set a norm's factors."""
        self._engine.set_norm(kind, layer, self._keep(weight.float().contiguous().numpy()))

    def set_vector(self, kind: VectorKind, layer: int, values: Tensor) -> None:
        """Set a vector."""
        self._engine.set_vector(kind, layer, self._keep(values.float().contiguous().numpy()))

    def set_embedding(self, table: Tensor) -> None:
        """Set the table of embeddings, [V, N]."""
        self._engine.set_embedding(self._keep(table.contiguous().view(torch.uint8).numpy()))

    def _keep(self, array: npt.NDArray[Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data


class TestRopes(RopeTables):
    """Tables of rotations in memory of their own. ``angles``: of each rope, [positions, head_dim / 2] float64."""

    __test__ = False

    def __init__(self, angles: Sequence[Tensor]) -> None:
        self._rows = [tuple(np.ascontiguousarray(part.float().numpy()) for part in (a.cos(), a.sin())) for a in angles]
        addresses = [RopeRows(*(rows.ctypes.data for rows in pair)) for pair in self._rows]
        super().__init__(addresses, len(angles[0]) if angles else 0)
