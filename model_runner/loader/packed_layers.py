"""Linear layers that keep their weights in as few bits as the checkpoint, and how those are loaded.

``PackedLayers`` first chooses the layers, before the model has memory for floats in their place. Then the rest of the
model is loaded without them (``left_out``). Last, ``fill`` loads their weights.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...model_files.errors import InvalidWeights
from ...model_files.sharding import Axis, Shard
from ...runtime.progress import ProgressLog
from ..ops.layers.linear import Linear, Product
from ..ops.packed.matrices import Int4Matrix, PackedMatrix, join
from ..ops.packed.weights import FP8Weight
from .packed_sources import PackedSource
from .samples import spread
from .tensor_samples import as_sample

log = logging.getLogger(__name__)

NO_PRODUCT = "nothing multiplies them packed"
OTHER_GROUPS = "what lies in one product with them has scales for other groups of columns (desc_act)"
PARTLY = "others that lie in one product with them can't stay packed"


class PackedLayers:
    """The layers that stay packed, by the names of their weights. The other layers' weights become floats.

    ``left_out``: the names of the packed weights.
    """

    def __init__(
        self,
        layers: Mapping[tuple[str, ...], Linear],
        source: PackedSource,
        dtype: torch.dtype,
        device: torch.device,
        product: Product,
        shard: Shard | None = None,
        *,
        eight: bool = False,
    ) -> None:
        """Choose those of ``layers`` that stay packed, and drop their floating-point weights. Weights are read by
        ``fill``. ``dtype``: type of the model. ``product``: multiplies with packed weights. ``eight``: whether
        activations are rounded to FP8. ``shard``: the rank's part that ``layers`` are; None: all.
        """
        self._source = source
        self._shard = shard
        self._dtype, self._device = dtype, device
        self._product = product
        self._eight = eight
        self._layers: dict[tuple[str, ...], Linear] = {}
        self._others: dict[str, str] = {}
        """Reason why a weight does not stay packed, by name."""
        for names, layer in layers.items():
            if not self._find_others(names):
                layer.keep_packed()
                self._layers[names] = layer
        self.left_out = frozenset(name for names in self._layers for name in names)
        for name in source.names - self.left_out - self._others.keys():
            self._others[name] = NO_PRODUCT

    def fill(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bytes]:
        """Read the packed weights of the chosen layers to the device.

        ``shapes``: those of the whole weights. Return values of each whole weight by name, for ``fingerprint``. They
        equal those of the dequantised weight. Raises ``InvalidWeights``.
        """
        samples: dict[str, bytes] = {}
        progress = ProgressLog(log, "loading packed weights", len(self._layers))
        with torch.inference_mode():
            for names, layer in self._layers.items():
                parts = []
                for name in names:
                    matrix = self._read(name, shapes[name])
                    samples[name] = self._sample(name, matrix)
                    parts.append(self._part(name, matrix))
                if len({part.group for part in parts if isinstance(part, Int4Matrix)}) > 1:
                    raise InvalidWeights(f"{names[0]!r} has other groups of columns than {', '.join(names[1:])}")
                layer.use_packed(join(parts, eight=self._eight), self._product)
                progress.advance(1)
        return samples

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the packed weights take; 0 before ``fill``."""
        return sum(layer.packed.nbytes for layer in self._layers.values() if layer.packed is not None)

    @property
    def rounding(self) -> str:
        """Rounding that ``fingerprint`` distinguishes: "w8a8" if activations are rounded to FP8, else "none".

        With "none", results differ from those of dequantised weights by the order of sums alone.
        """
        otherwise = any(isinstance(layer.packed, FP8Weight) and layer.packed.eight for layer in self._layers.values())
        return "w8a8" if otherwise else "none"

    def log_summary(self) -> None:
        """Log which matrices stay packed; warn of those that are packed in the files and became floats, and why."""
        kinds = Counter(
            layer.packed.kind for names, layer in self._layers.items() for _ in names if layer.packed is not None
        )
        counts = ", ".join(f"{count} in {kind}" for kind, count in sorted(kinds.items())) or "none"
        log.info("matrices that stay packed: %s, %.1f MiB", counts, self.nbytes / 2**20)
        floats = str(self._dtype).removeprefix("torch.")
        for reason in sorted(set(self._others.values())):
            names = [name for name, why in self._others.items() if why == reason]
            log.warning("dequantised to %s: %s: %s", floats, _listing(names), reason)

    def _find_others(self, names: Sequence[str]) -> bool:
        """Return whether the weights ``names`` of a layer must become floats, because they can't stay packed together.

        If so, note the reason for each that is packed in the files.
        """
        packed = [name for name in names if name in self._source.names]
        reasons = {name: reason for name in packed if (reason := self._why_not(name)) is not None}
        if len(packed) == len(names) and not reasons:
            first, *others = (self._source.groups(name) for name in names)
            if all(_are_same(first, other) for other in others):
                return False
            reasons = dict.fromkeys(names, OTHER_GROUPS)
        self._others |= {name: reasons.get(name, PARTLY) for name in packed}
        return True

    def _why_not(self, name: str) -> str | None:
        part = None if self._shard is None else self._shard.slice_of(name)
        reason = self._source.why_not(name)
        if reason is not None or part is None or part.axis is Axis.ROWS:
            return reason
        if self._source.groups(name) is not None:
            return "a rank's columns are no whole groups (desc_act)"
        unit = self._source.unit(name)
        return None if part.begin % unit == part.size % unit == 0 else f"a rank's columns are no blocks of {unit}"

    def _read(self, name: str, shape: tuple[int, ...]) -> PackedMatrix:
        matrix = self._source.read(name, self._device)
        if matrix.shape != shape:
            raise InvalidWeights(f"{name!r} has shape {list(matrix.shape)}, the config means {list(shape)}")
        return matrix

    def _part(self, name: str, matrix: PackedMatrix) -> PackedMatrix:
        """Return the rows or columns of the matrix that this rank computes with; all of it without ranks.

        ``matrix``: the whole weight ``name``.
        """
        part = None if self._shard is None else self._shard.slice_of(name)
        if part is None:
            return matrix
        if part.axis is Axis.ROWS:
            return matrix.take(slice(part.begin, part.end))
        return matrix.take_columns(part.begin, part.end)

    def _sample(self, name: str, matrix: PackedMatrix) -> bytes:
        rows, columns = (torch.from_numpy(spread(size)).to(self._device) for size in matrix.shape)
        return as_sample(name, matrix.shape, matrix.elements(rows, columns), self._dtype)


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _listing(names: Sequence[str]) -> str:
    """Return the names as text, alike ones counted: with "*" in place of the numbers of layers and experts."""
    alike = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name).removesuffix(".weight") for name in names)
    return ", ".join(f"{count} {name}" for name, count in sorted(alike.items()))
