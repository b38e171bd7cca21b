"""A packed model on the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

from ...model_files.spec import ModelSpec
from ..dtypes import DType
from .library import ActivationDType
from .native_engine import WHOLE, NativeEngine, NormKind, Ranks, VectorKind
from .packed_model import PackedModel
from .pool_view import KernelPool
from .rope_tables import RopeRows, RopeTables
from .structs import WeightPart
from .team import Team
from .weight_packer import LinearKind, LinearPlace


class NativeModel(NativeEngine):
    """The engine of ``packed``, over ``pools``. Raises ``BuildError`` if the kernels can't be built."""

    def __init__(
        self,
        packed: PackedModel,
        spec: ModelSpec,
        dtype: DType,
        pools: Sequence[KernelPool],
        team: Team,
        ranks: Ranks = WHOLE,
    ) -> None:
        """Prepare an engine that uses the weights where ``packed`` has them, and keep ``packed`` alive.

        ``ranks``: this rank's part, and its exchange with the other tensor-parallel ranks; ``packed``, ``spec`` and
        ``pools`` are this rank's part. Raises ``BuildError`` or ``MemoryError``.
        """
        contents = packed.contents
        rows = [RopeRows(packed.address(cos), packed.address(sin)) for cos, sin in contents.ropes]
        activations = ActivationDType[(contents.activations or "int16").upper()]
        super().__init__(spec, dtype, RopeTables(rows, contents.positions), pools, team, ranks, activations)
        # The engine reads weights from its mapping.
        self._packed = packed
        self.weight_bytes = contents.step_bytes
        """Bytes of the linear layers' weights that a decode step of one token reads: of experts, those it chooses."""
        for linear in contents.linears:
            place = LinearPlace(LinearKind(linear.kind), linear.layer, linear.expert)
            parts = [WeightPart(None, rows, block_format) for rows, block_format in linear.parts]
            bias = packed.address(linear.bias) if linear.bias else None
            self.set_linear(place, parts, packed.address(linear.panels), bias)
        for norm in contents.norms:
            self.set_norm(NormKind(norm.kind), norm.layer, packed.address(norm.values))
        for vector in contents.vectors:
            self.set_vector(VectorKind(vector.kind), vector.layer, packed.address(vector.values))
        self.set_embedding(packed.address(contents.embedding) if contents.embedding else None)
