"""Where packed matrices come from: a checkpoint's files, or nowhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...model_files.checkpoint import checkpoint_files
from ...model_files.errors import InvalidWeights, brief
from ...model_files.packed_names import FOUR_BITS, is_packed, weight_name
from ...model_files.packing import Packing, PackingKind
from ...model_files.rope_order import row_order
from ...model_files.spec import ModelSpec
from ...model_files.tensor_names import Part, find_parts
from ..ops.packed.matrices import LEAST_GROUP, FP8Matrix, Int4Matrix, PackedMatrix
from ..ops.packed.weights import COLUMNS, SYMMETRIC_ZERO
from .dummy_weights import STD
from .packed_weights import A_WORD, packed_matrix

GROUPS = (128, 64, LEAST_GROUP)
"""Columns that share a scale of four bits drawn at random: the most that the row's length allows."""


class PackedSource(ABC):
    """Packed matrices by our names, their rows in our order."""

    names: frozenset[str]

    @abstractmethod
    def why_not(self, name: str) -> str | None:
        """Return why the kernels can't multiply with matrix ``name`` as it is packed, or None if they can.

        Reads headers and groups, not the matrix.
        """

    @abstractmethod
    def unit(self, name: str) -> int:
        """Return the number of columns that a rank's part of the matrix must be a multiple of."""

    def groups(self, name: str) -> Tensor | None:
        """Return which group of shared scales each column belongs to ([I] int64).

        Return None if each group's columns are neighbours, in order. This default always returns None.
        """
        return None

    @abstractmethod
    def read(self, name: str, device: torch.device) -> PackedMatrix:
        """Read the packed matrix ``name`` to ``device``, its rows in the engine's order. Raises ``InvalidWeights``."""


class _PackedTensor(NamedTuple):
    """The checkpoint's ``tensor`` in which ``part`` of ``parts`` lies; ``shape``: of the numbers as they are stored."""

    tensor: str
    shape: tuple[int, ...]
    part: Part
    parts: tuple[Part, ...]


class CheckpointMatrices(PackedSource):
    """Matrices of the safetensors files in a folder. Numbers are read when asked for, and unpacked on the device."""

    def __init__(self, folder: Path, spec: ModelSpec, packing: Packing) -> None:
        """Open the files of ``folder`` and find their packed matrices, without reading them.

        Raises ``InvalidWeights`` if a file can't be read.
        """
        self._spec = spec
        self._packing = packing
        self._files: dict[str, Any] = {}
        """Open files by tensor: with many experts, a file takes long to list its contents."""
        self._places: dict[str, _PackedTensor] = {}
        for file in checkpoint_files(folder):
            tensors = _open(file)
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                self._files[name] = tensors
                stored = tensors.get_slice(name)
                if is_packed(name, stored.get_dtype(), packing):
                    parts = find_parts(spec, weight_name(name))
                    shape = tuple(stored.get_shape())
                    self._places |= {part.name: _PackedTensor(name, shape, part, parts) for part in parts}
        self.names = frozenset(self._places)
        self._last: tuple[str, PackedMatrix] | None = None

    def why_not(self, name: str) -> str | None:
        """Return why the kernels can't multiply with the matrix as it is packed, or None if they can.

        They need multiples of a number of columns that share a scale. Reads shapes from the files' headers, and for
        GPTQ the group of each column.
        """
        unit = self.unit(name)
        if self._packing.kind is PackingKind.FP8:
            if unit == 1 or unit % COLUMNS == 0:
                return None
            return f"blocks of {unit} columns, and products know multiples of {COLUMNS}"
        if unit % LEAST_GROUP:
            return f"groups of {unit} columns, and products know multiples of {LEAST_GROUP}"
        groups = self.groups(name)
        if groups is not None and not bool((groups.bincount() == unit).all()):
            return "groups of unlike numbers of columns"
        return None

    def groups(self, name: str) -> Tensor | None:
        """Return the group of each column ([I] int64) that the checkpoint stores.

        Return None if it stores none, or if each group's columns are neighbours. AWQ and FP8 have no such groups.
        """
        of_groups = None if self._packing.kind is PackingKind.AWQ else self._beside(name, "groups")
        groups = None if of_groups is None else self._tensor(of_groups)
        if groups is None or torch.equal(groups.long(), torch.arange(len(groups)) // self.unit(name)):
            return None
        return groups.long()

    def unit(self, name: str) -> int:
        """Return the number of columns that share a scale, or 1 if all columns do.

        Scales of an unexpected shape give ``LEAST_GROUP``; ``read`` refuses them.
        """
        place = self._places[name]
        if self._packing.kind is PackingKind.FP8:
            block = self._packing.block
            return 1 if block is None or block[1] >= place.shape[1] else block[1]
        scales, is_int4 = self._beside(name, "scales"), self._packing.kind is PackingKind.INT4
        shape = [] if scales is None else self._files[scales].get_slice(scales).get_shape()
        count = shape[1 if is_int4 else 0] if len(shape) == 2 else 0
        # AWQ has outputs in its words.
        inputs = place.shape[1 if is_int4 else 0] * (1 if self._packing.kind is PackingKind.AWQ else A_WORD)
        # What does not fit is for the reader to refuse.
        return LEAST_GROUP if not count or inputs % count else inputs // count

    def read(self, name: str, device: torch.device) -> PackedMatrix:
        """Read the matrix ``name`` to ``device``, still packed, its rows in the engine's order.

        Raises ``InvalidWeights``. The last tensor stays in memory, because the next matrix is often part of it.
        """
        place = self._places[name]
        if self._last is None or self._last[0] != place.tensor:
            self._last = (place.tensor, self._read_whole(place.tensor, device))
        whole = self._last[1]
        rows = sum(part.rows or 0 for part in place.parts)
        if len(place.parts) > 1 and whole.shape[0] != rows:
            raise InvalidWeights(f"{place.tensor!r} has {whole.shape[0]} rows, the config means {rows}")
        own, order = whole.take(place.part.where), row_order(self._spec, name)
        if order is None or len(order) != own.shape[0]:
            return own
        return own.take(torch.from_numpy(order).to(device))

    def _beside(self, name: str, what: Literal["scales", "groups"]) -> str | None:
        """Return the name in the files of a matrix's tensor of scales or of groups, or None if the files have none.

        ``name``: the matrix's name in the engine. ``what``: which of the two tensors. FP8 always gives None.
        """
        endings = FOUR_BITS.get(self._packing.kind)
        if endings is None:
            return None
        found = self._places[name].tensor.removesuffix(endings.numbers) + getattr(endings, what)
        return found if found in self._files else None

    def _tensor(self, name: str) -> Tensor | None:
        found: Tensor | None = self._files[name].get_tensor(name) if name in self._files else None
        return found

    def _read_whole(self, tensor: str, device: torch.device) -> PackedMatrix:
        def read(name: str) -> Tensor | None:
            found = self._tensor(name)
            return None if found is None else found.to(device)

        numbers = read(tensor)
        found = None if numbers is None else packed_matrix(tensor, numbers, self._packing, read)
        if found is None:
            raise InvalidWeights(f"{tensor!r} is no matrix in {self._packing.kind}")
        return found


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        raise InvalidWeights(f"{file} can't be read: {brief(e)}; download it again") from e


class DummyMatrices(PackedSource):
    """Random ones, of every shape that is asked for, about as large as ``DummyWeights``."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], packing: Packing, seed: int) -> None:
        self._shapes = shapes
        self._packing = packing
        self._seed = seed
        self.names = frozenset(shapes)

    def why_not(self, name: str) -> str | None:
        """Return a reason if rows of four-bit weights are not a multiple of ``LEAST_GROUP`` columns; None for FP8."""
        inputs = self._shapes[name][1]
        if self._packing.kind is PackingKind.FP8 or inputs % LEAST_GROUP == 0:
            return None
        return f"rows of {inputs} columns are no multiple of {LEAST_GROUP}"

    def unit(self, name: str) -> int:
        """Return the number of columns that share a scale, or 1 if a whole FP8 row does.

        With four bits it is the largest of ``GROUPS`` that divides the row.
        """
        if self._packing.kind is PackingKind.FP8:
            return 1 if self._packing.block is None else self._packing.block[1]
        return next(group for group in GROUPS if self._shapes[name][1] % group == 0)

    def read(self, name: str, device: torch.device) -> PackedMatrix:
        """Draw the packed matrix ``name`` at random on ``device``; every call returns the same numbers."""
        outputs, inputs = self._shapes[name]
        generator = torch.Generator(device).manual_seed(self._seed)
        if self._packing.kind is PackingKind.FP8:
            drawn = torch.empty(outputs, inputs, device=device).normal_(0.0, 64.0, generator=generator)
            block = self._packing.block or (outputs, inputs)
            counts = (-(-outputs // block[0]), -(-inputs // block[1]))
            scales = torch.full(counts, STD / 64.0, device=device)
            return FP8Matrix(drawn.clamp_(-448, 448).to(torch.float8_e4m3fn), scales, *block)
        group = self.unit(name)
        numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device, generator=generator)
        zeros = torch.full((inputs // group, outputs), SYMMETRIC_ZERO, dtype=torch.uint8, device=device)
        # Of numbers from 0 to 15 the standard deviation is 4.6.
        return Int4Matrix(numbers, zeros, torch.full(zeros.shape, STD / 4.6, device=device).half(), None)
