"""Loads the weights of a torch model, or of the part that a rank computes: once, and again after they were dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...model_files.errors import OTHER_WEIGHTS, InvalidWeights
from ...model_files.model_path import ModelSource
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..models.decoder import Decoder
from ..models.group import RankGroup, alone
from ..ops.choose import choose_ops
from ..options import WorkerOptions
from .fingerprint import fingerprint
from .load import load_model_weights
from .open_packed import choose_quantization, open_packed
from .quantization import Quantization


class Weights(NamedTuple):
    """A model with its weights."""

    model: Decoder
    quantization: Quantization
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
    find_group: Callable[[], RankGroup] = lambda: alone
    """Meets the ranks that the torch model computes with. Raises ``UnsupportedModel``."""

    def load(self) -> Weights:
        """Make the model, read its weights, and return both with their fingerprint.

        Raises ``InvalidWeights``, ``UnsupportedModel`` or another ``ModelError``.
        """
        options, source, spec, shard = self.options, self.source, self.spec, self.shard
        quantization = choose_quantization(options, source, self.device, self.dtype, is_alone=shard is None)
        model, packed = self._make_model(), None
        if quantization == "packed" or quantization == "w8a8":
            seed = options.random_seed if options.load_format == "dummy" else None
            packed = open_packed(quantization, model, source, spec, self.dtype, seed, shard)
        views = model.weights()
        assert options.load_format != "script", "a script has no weights"
        samples = load_model_weights(views, source, spec, options.load_format, options.random_seed, shard, packed)
        nbytes = sum(view.nbytes for view in views.values())
        if packed is not None:
            nbytes += packed.nbytes - sum(views[name].nbytes for name in packed.left_out)
        rounding = "none" if packed is None else packed.rounding
        return Weights(model, quantization, fingerprint(self.identity, samples, rounding), nbytes, self.dtype)

    def reload(self, expected: str) -> Weights:
        """Load the weights again, into a new model. Raise ``InvalidWeights`` if the fingerprint is not ``expected``."""
        weights = self.load()
        if weights.fingerprint != expected:
            raise InvalidWeights(OTHER_WEIGHTS)
        return weights

    def _make_model(self) -> Decoder:
        ops, shard = choose_ops(self.device), self.shard
        if shard is None:
            return Decoder(self.spec, self.dtype, self.device, ops=ops)
        return Decoder(shard.spec, self.dtype, self.device, shard.vocab, self.find_group(), ops)
