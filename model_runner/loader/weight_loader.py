"""Loads the weights of a native model, or of the part that a rank computes: once, and again after they were dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...model_files.errors import OTHER_WEIGHTS, InvalidWeights, UnsupportedModel
from ...model_files.model_path import ModelSource
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..models.decoder import Decoder
from ..models.group import RankGroup, alone
from ..ops.choose import choose_ops
from ..options import WorkerOptions
from .load import fingerprint, load_model_weights
from .open_blocks import open_blocks
from .open_packed import choose_quantization, open_packed
from .packed_layers import PackedLayers
from .quantization import Quantization, QuantizedActivations
from .quantized_blocks import BlockSource, has_whole_blocks

log = logging.getLogger(__name__)


class Weights(NamedTuple):
    """A model with its weights."""

    model: Decoder
    blocks: BlockSource | None
    """Quantised weights that stand for some of the model's; None: all are the model's."""
    quantization: Quantization
    activations: QuantizedActivations | None
    """Type that activations are rounded to; None: they stay as they are."""
    fingerprint: str
    """Fingerprint of the whole model, also on a rank."""
    nbytes: int
    """Bytes of memory."""
    dtype: torch.dtype
    """Type of weights and activations."""


@dataclass(frozen=True)
class WeightLoader:
    """Loads the weights of one model, from files or at random. Raises ``ModelError``."""

    options: WorkerOptions
    source: ModelSource
    spec: ModelSpec
    identity: ModelSpec
    """Description by which instances recognise each other."""
    dtype: torch.dtype
    device: torch.device
    shard: Shard | None
    """Part of the model to load; None: all of it."""
    is_native: bool
    """Whether the C++ engine computes."""
    find_group: Callable[[], RankGroup] = lambda: alone
    """Meets the ranks that the torch model computes with. Raises ``UnsupportedModel``."""

    def load(self) -> Weights:
        """Make the model, read its weights, and return both with their fingerprint.

        Raises ``InvalidWeights``, ``UnsupportedModel`` or another ``ModelError``.
        """
        options, source, spec, shard = self.options, self.source, self.spec, self.shard
        quantization = choose_quantization(
            options, source, self.device, self.dtype, is_torch=not self.is_native, is_alone=shard is None
        )
        blocks = self._open_blocks(quantization)
        model, packed = self._make_model(), None
        if quantization == "packed" or quantization == "w8a8":
            seed = options.random_seed if options.load_format == "dummy" else None
            packed = open_packed(quantization, model, source, spec, self.dtype, seed, shard)
        views = model.weights()
        assert options.load_format != "script", "a script has no weights"
        samples = load_model_weights(
            views, source, spec, options.load_format, options.random_seed, blocks, shard, packed
        )
        nbytes = sum(view.nbytes for view in views.values())
        for instead in (packed, blocks):
            if instead is not None:
                nbytes += instead.nbytes - sum(views[name].nbytes for name in instead.left_out)
        return Weights(
            model,
            blocks,
            quantization,
            None if blocks is None else options.quantized_activations,
            fingerprint(self.identity, samples, self._rounding(quantization, packed), blocks),
            nbytes,
            self.dtype,
        )

    def reload(self, expected: str) -> Weights:
        """Load the weights again, into a new model. Raise ``InvalidWeights`` if the fingerprint is not ``expected``."""
        weights = self.load()
        if weights.fingerprint != expected:
            raise InvalidWeights(OTHER_WEIGHTS)
        return weights

    def _open_blocks(self, quantization: Quantization) -> BlockSource | None:
        if quantization == "none" or quantization == "packed" or quantization == "w8a8":
            return None
        if not self.is_native:
            raise UnsupportedModel(
                f"--quantization {self.options.quantization} needs the CPU kernels, which can't be used here"
            )
        activations = self.options.quantized_activations
        return open_blocks(quantization, self.source, self.spec, self.dtype, self.shard, activations)

    def _make_model(self) -> Decoder:
        ops, shard = choose_ops(self.device), self.shard
        if shard is None:
            return Decoder(self.spec, self.dtype, self.device, ops=ops)
        return Decoder(shard.spec, self.dtype, self.device, shard.vocab, self.find_group(), ops)

    def _rounding(self, quantization: Quantization, packed: PackedLayers | None) -> str:
        shard = self.shard
        if packed is not None:
            return packed.rounding
        if quantization in ("int8", "int4") and shard is not None and not has_whole_blocks(shard.spec):
            # Those layers stay as they are: another model than where they are rounded.
            log.warning("--tp-size %d: rows that are no whole blocks on a rank are not rounded", shard.size)
            return f"{quantization} on {shard.size} ranks"
        return quantization
