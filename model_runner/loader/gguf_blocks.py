"""The blocks of a GGUF file, served as they are: which linear layers can be, and what the others cost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from gguf import GGML_QUANT_SIZES

from ...model_files.errors import InvalidWeights
from ...model_files.sharding import Axis, Shard, Slice
from ...model_files.spec import ExpertsSpec, MLASpec, MLPSpec, ModelSpec
from .arrays import Array, float_type
from .gguf_weights import GGUFMatrix, GGUFWeights
from .quantized_blocks import FORMATS, HEAD_NAMES, BlockSource, BlockWeight
from .samples import spread

log = logging.getLogger(__name__)

UNQUANTISED = ("F32", "F16", "BF16", "F64")
PANEL = 32
"""Outputs that the kernels compute together: all of one kind."""


class GGUFBlocks(BlockSource):
    """The matrices of a file in formats that the kernels know. The file is open for the lifetime of this object."""

    def __init__(self, path: Path, spec: ModelSpec, shard: Shard | None = None) -> None:
        """Open the file at ``path``, and find its matrices that can be served as quantised blocks.

        ``spec``: the whole model. ``shard``: rank of the part that is served, or None for all.
        """
        self._shard = shard
        self._matrices = GGUFWeights(path, spec).matrices()
        known = {group for group in linear_layers(spec) if self._is_known(group)}
        self._served = {group: group in known and self._can_divide(group) for group in linear_layers(spec)}
        self.left_out = self._names([group for group in known if self._served[group]])
        # Where a rank's part is no whole blocks, it is the same weights all the same.
        self.identifying = self._names(known)
        self.nbytes = sum(self._nbytes(name, self._matrices[name]) for name in self.left_out)

    def find(self, names: Sequence[str], weight: Array) -> list[BlockWeight] | None:
        """Return this rank's blocks of each weight in ``names``, as in the file but with rows in the engine's order.

        ``names``: weights of one linear layer. Return None for a layer that is not served as blocks. A tied head comes
        from the embedding's blocks. ``weight`` is not used.
        """
        if not self._served[tuple(names)]:
            return None
        matrices = [(name, self._matrix(name)) for name in names]
        return [BlockWeight(FORMATS[m.kind], np.ascontiguousarray(self._part(name, m))) for name, m in matrices]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``InvalidWeights`` if a matrix served as blocks is not in ``shapes``, or has another shape there."""
        for name in self.left_out:
            shape = self._matrices[name].shape
            if name not in shapes:
                raise InvalidWeights(f"the checkpoint holds {name!r}, which its config does not account for")
            if shape != tuple(shapes[name]):
                raise InvalidWeights(f"{name!r} has shape {list(shape)}, the config means {list(shapes[name])}")

    def sample(self, name: str, digest: xxhash.xxh3_64) -> None:
        """Add the format, shape and some bytes of the matrix ``name`` to ``digest``, to tell it from other weights."""
        matrix = self._matrices[name]
        digest.update(f"{matrix.kind.name}{matrix.shape}".encode())
        rows, columns = (spread(size) for size in matrix.rows.shape)
        digest.update(matrix.rows[rows, columns].tobytes())

    def log_summary(self, floats: str) -> None:
        """Log which matrices are served as blocks, and which quantised ones are not and how many MiB more they take.

        ``floats``: name of the type of floats.
        """
        itemsize = float_type(floats).itemsize
        served, others = Counter[str](), Counter[str]()
        nbytes = cost = 0
        for group, is_served in self._served.items():
            for name, matrix in ((name, self._matrix(name)) for name in filter(self._has, group)):
                if is_served:
                    served[matrix.kind.name] += 1
                    nbytes += self._nbytes(name, matrix)
                elif matrix.kind.name not in UNQUANTISED:
                    others[matrix.kind.name] += 1
                    as_floats = matrix.shape[0] * matrix.shape[1] * itemsize
                    cost += int((as_floats - matrix.rows.nbytes) * self._share(name, matrix))
        table = self._matrices[HEAD_NAMES[1]]
        line = (
            f"linear layers as the file's own blocks: {_listing(served)}, {nbytes / 2**20:.1f} MiB; the table of "
            f"embeddings in {floats}: {table.shape[0] * table.shape[1] * itemsize / 2**20:.1f} MiB"
        )
        if others:
            line += f"; dequantised to {floats}: {_listing(others)}, {cost / 2**20:.1f} MiB more than as blocks"
        log.log(logging.WARNING if others else logging.INFO, "%s", line)

    def _matrix(self, name: str) -> GGUFMatrix:
        return self._matrices[HEAD_NAMES[1] if name == HEAD_NAMES[0] and name not in self._matrices else name]

    def _has(self, name: str) -> bool:
        return name in self._matrices or (name == HEAD_NAMES[0] and HEAD_NAMES[1] in self._matrices)

    def _names(self, groups: Iterable[tuple[str, ...]]) -> frozenset[str]:
        # A tied head is multiplied with as blocks, but the table of embeddings beside it is read by the row.
        return frozenset({name for group in groups for name in group} & self._matrices.keys() - {HEAD_NAMES[1]})

    def _is_known(self, group: tuple[str, ...]) -> bool:
        if not all(self._has(name) for name in group):
            return False  # for the loader to refuse
        matrices = [self._matrix(name) for name in group]
        if any(matrix.kind not in FORMATS for matrix in matrices):
            return False
        # Queries, keys and values have panels of their own; a gate's output shares one with what it is multiplied by.
        # A latent row begins at a panel's border.
        if not self._is_mixed(group) or group[-1].endswith("kv_a_proj.weight"):
            return True
        return len(group) == 3 and all(m.shape[0] % PANEL == 0 for m in matrices)

    def _is_mixed(self, group: tuple[str, ...]) -> bool:
        return len({self._matrix(name).kind for name in group}) > 1

    def _can_divide(self, group: tuple[str, ...]) -> bool:
        """Return whether this rank's part of ``group`` can be served as the file's blocks.

        ``group``: names of weights that one product multiplies with. The part must consist of whole blocks. If the
        weights' formats differ, each one's rows must also fill panels of ``PANEL`` rows. All of their formats must be
        known.
        """
        parts = [(name, self._matrix(name)) for name in group]
        if not all(self._is_whole(name, matrix) for name, matrix in parts):
            return False
        rows = [matrix.shape[0] * self._share(name, matrix) for name, matrix in parts]
        is_latent = group[-1].endswith("kv_a_proj.weight")
        return is_latent or not self._is_mixed(group) or all(count % PANEL == 0 for count in rows)

    def _slice(self, name: str) -> Slice | None:
        return None if self._shard is None else self._shard.slice_of(name)

    def _share(self, name: str, matrix: GGUFMatrix) -> Fraction:
        """Return the fraction of the matrix that this rank computes with; 1 without ranks."""
        part = self._slice(name)
        return Fraction(1) if part is None else Fraction(part.size, matrix.shape[part.axis])

    def _nbytes(self, name: str, matrix: GGUFMatrix) -> int:
        return int(matrix.rows.nbytes * self._share(name, matrix))

    def _is_whole(self, name: str, matrix: GGUFMatrix) -> bool:
        """Return whether this rank's columns of the matrix begin and end between blocks.

        Return True if ranks divide the matrix by rows.
        """
        part, block = self._slice(name), GGML_QUANT_SIZES[matrix.kind][0]
        return part is None or part.axis is Axis.ROWS or part.begin % block == part.end % block == 0

    def _part(self, name: str, matrix: GGUFMatrix) -> npt.NDArray[Any]:
        """Return this rank's part of the matrix as blocks: some of its rows, or some blocks of every row.

        Rows are in the engine's order.
        """
        part, rows = self._slice(name), matrix.ordered_rows
        if part is None:
            return rows
        if part.axis is Axis.ROWS:
            return rows[part.begin : part.end]
        block, nbytes = GGML_QUANT_SIZES[matrix.kind]
        return rows[:, part.begin // block * nbytes : part.end // block * nbytes]


def linear_layers(spec: ModelSpec) -> Iterator[tuple[str, ...]]:
    """Yield, for each linear layer of the engine, the names of the weights that one product multiplies with.

    They are in the order of the layer's outputs. The last layer is the head.
    """
    for i, layer in enumerate(spec.layers):
        q, k, v, o, q_a, q_b, kv_a = (
            f"layers.{i}.{name}_proj.weight" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_a")
        )
        if not isinstance(layer.attention, MLASpec):
            yield from ((q, k, v), (o,))
        elif layer.attention.q_lora_rank is None:
            yield from ((q, kv_a), (o,))
        else:
            yield from ((q_a, kv_a), (q_b,), (o,))
        for network in _networks(layer.mlp):
            gate, up, down = (f"layers.{i}.{network}{name}_proj.weight" for name in ("gate", "up", "down"))
            yield from ((gate, up), (down,))
    yield HEAD_NAMES[:1]


def _networks(mlp: MLPSpec | ExpertsSpec) -> list[str]:
    """Return the prefixes of the weights' names, one for each of the layer's networks: its MLP, or its experts."""
    if isinstance(mlp, MLPSpec):
        return [""]
    return [f"experts.{i}." for i in range(mlp.count)] + (["shared."] if mlp.shared is not None else [])


def _listing(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} in {kind}" for kind, count in sorted(kinds.items())) or "none"
