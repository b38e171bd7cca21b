"""Loads the weights of a model that the CPU kernels compute, or of a rank's part, for them to be packed.

Imports no torch, except for what ``torch_import.py`` then names in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from ...model_files.model_path import ModelSource
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..options import WorkerOptions
from .arrays import Array, as_bits, type_name
from .base import WeightPlace
from .fill import Origin, fill_places
from .fingerprint import fingerprint
from .host_model import HostModel
from .open_blocks import choose_blocks, open_blocks
from .quantization import AsBlocks, QuantizedActivations
from .quantized_blocks import BlockSource, has_whole_blocks

log = logging.getLogger(__name__)


class Conversion(Protocol):
    """Turns the numbers in files into those of a model."""

    def copy(self, values: Array, out: Array) -> None:
        """Copy floats to ``out``, of the same shape, and convert them to its type."""
        ...

    def dequantise(self, rows: npt.NDArray[Any], kind: GGMLQuantizationType, dtype: np.dtype[Any]) -> Array:
        """Return the numbers of a matrix [N, ...] of a GGUF file: quantised ones as ``dtype``, others as they are.

        Raises ``NotImplementedError`` for an unknown kind.
        """
        ...


class HostWeights(NamedTuple):
    """A model's weights, before they are packed."""

    model: HostModel
    blocks: BlockSource | None
    """Quantised weights that stand for some of the model's; None: all are the model's."""
    quantization: AsBlocks
    activations: QuantizedActivations | None
    """Type that activations are rounded to; None: they stay as they are."""
    fingerprint: str
    """Fingerprint of the whole model, also on a rank."""
    nbytes: int
    """Bytes of memory."""


class ArrayPlace(WeightPlace):
    """A view of an array of the model."""

    def __init__(self, view: Array, copy: Callable[[Array, Array], None]) -> None:
        self._view = view
        self._copy = copy
        self.nbytes = view.nbytes
        self.dtype = type_name(view.dtype)

    def take(self, values: Array) -> None:
        """Copy floats of the view's shape into it, and convert them to its type."""
        self._copy(values, self._view)

    def clear(self) -> None:
        """Fill the view with 0."""
        as_bits(self._view)[...] = 0


@dataclass(frozen=True)
class HostLoader:
    """Loads the weights of one model, from files or at random. Raises ``ModelError``."""

    options: WorkerOptions
    source: ModelSource
    spec: ModelSpec
    identity: ModelSpec
    """Description by which instances recognise each other."""
    dtype: str
    """Name of the type of weights and activations."""
    shard: Shard | None
    """Part of the model to load; None: all of it."""
    conversion: Conversion

    def load(self) -> HostWeights:
        """Make the model's arrays, read its weights, and return both with their fingerprint.

        Raises ``InvalidWeights``, ``UnsupportedModel`` or another ``ModelError``.
        """
        options, spec, shard = self.options, self.spec, self.shard
        quantization = choose_blocks(options, self.source)
        activations = options.quantized_activations
        blocks = open_blocks(quantization, self.source, spec, self.dtype, shard, activations)
        whole = shard is None
        model = HostModel(spec, self.dtype) if shard is None else HostModel(shard.spec, self.dtype, shard.vocab)
        views = model.weights()
        assert options.load_format != "script", "a script has no weights"
        origin = Origin(self.source, spec, options.load_format, options.random_seed, shard, self.conversion.dequantise)
        shapes = {name: view.shape for name, view in views.items()} if whole else origin.whole_shapes()
        left_out, nbytes = frozenset[str](), sum(view.nbytes for view in views.values())
        if blocks is not None:
            blocks.check(shapes)
            left_out = blocks.left_out
            nbytes += blocks.nbytes - sum(views[name].nbytes for name in left_out)
        places = {name: ArrayPlace(view, self.conversion.copy) for name, view in views.items()}
        samples = fill_places(places, shapes, origin, left_out)
        return HostWeights(
            model,
            blocks,
            quantization,
            None if blocks is None else activations,
            fingerprint(self.identity, samples, self._rounding(quantization), blocks),
            nbytes,
        )

    def _rounding(self, quantization: AsBlocks) -> str:
        shard = self.shard
        if quantization in ("int8", "int4") and shard is not None and not has_whole_blocks(shard.spec):
            # Those layers stay as they are: another model than where they are rounded.
            log.warning("--tp-size %d: rows that are no whole blocks on a rank are not rounded", shard.size)
            return f"{quantization} on {shard.size} ranks"
        return quantization
