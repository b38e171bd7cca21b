"""Weights in GGUF's block formats, for kernels that multiply with the blocks as they are. Imports no torch.

A weight [N, K] is N rows of blocks of 32 or 256 weights. Rows can be put in any order; blocks stay whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import xxhash
from gguf import GGMLQuantizationType

from ...model_files.spec import ExpertsSpec, ModelSpec
from ...model_files.tensor_names import EMBEDDING, HEAD
from .arrays import Array, widen
from .quantization import QuantizedActivations

BLOCK = 32
HEAD_NAMES = (HEAD, EMBEDDING)


class BlockFormat(IntEnum):
    """``Format`` of linear.h."""

    Q4_0 = 1
    Q4_1 = 2
    Q8_0 = 3
    Q5_0 = 4
    Q5_1 = 5
    IQ4_NL = 6
    Q4_K = 7
    Q5_K = 8
    Q6_K = 9


FORMATS = {GGMLQuantizationType[block_format.name]: block_format for block_format in BlockFormat}


class BlockWeight(NamedTuple):
    """``blocks``: uint8 [N, bytes of a row]."""

    format: BlockFormat
    blocks: npt.NDArray[np.uint8]


class BlockSource(ABC):
    """Where quantised weights come from."""

    left_out: frozenset[str] = frozenset()
    """Weights that need not be loaded as floats: the source has them, and no other code reads them."""
    identifying: frozenset[str] = frozenset()
    """Weights that ``sample`` tells from others: those, and what other ranks have left out."""
    activations: QuantizedActivations = "int16"
    """What the engine rounds activations to before it multiplies them with these weights."""
    nbytes = 0
    """What is served in their place."""

    @abstractmethod
    def find(self, names: Sequence[str], weight: Array) -> list[BlockWeight] | None:
        """Return the weights ``names`` of one linear layer as blocks, or None if the layer has to be dense.

        ``weight``: the same weights in a float type, [N, K]. It has no values if ``names`` are ``left_out``. Otherwise
        a source may round it.
        """

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``InvalidWeights`` unless the weights in ``left_out`` have the model's ``shapes``.

        This default is for a source that leaves none out.
        """
        assert not self.left_out

    def sample(self, name: str, digest: xxhash.xxh3_64) -> None:
        """Add format, shape and some bytes of the weight ``name`` to ``digest``, to tell it from other weights.

        ``name`` is one of ``identifying``. This default raises ``NotImplementedError``.
        """
        raise NotImplementedError


def has_whole_blocks(spec: ModelSpec) -> bool:
    """Return whether a rank's rows are whole blocks of 32 in all layers that ranks divide by columns.

    ``spec``: a rank's part of the model.
    """
    inner = {layer.mlp.inner for layer in spec.layers}
    inner |= {
        mlp.shared.inner for mlp in (layer.mlp for layer in spec.layers) if isinstance(mlp, ExpertsSpec) and mlp.shared
    }
    attended = {layer.attention.heads * layer.attention.attended_dim for layer in spec.layers}
    return not any(columns % BLOCK for columns in inner | attended)


class RoundedBlocks(BlockSource):
    """Weights rounded here, to ``bits``; the head always to 8, as every answer goes through it."""

    def __init__(self, bits: Literal[4, 8]) -> None:
        self._bits = bits

    def find(self, names: Sequence[str], weight: Array) -> list[BlockWeight] | None:
        """Round ``weight`` [N, K] to blocks of 4 bits (Q4_1) or 8 bits (Q8_0); the head always has 8 bits.

        ``names``: the weights of one linear layer, by which the head is known. Return None if K is not a multiple of
        32.
        """
        if weight.shape[1] % BLOCK:
            return None
        eight = self._bits == 8 or names[0] in HEAD_NAMES
        kind = GGMLQuantizationType.Q8_0 if eight else GGMLQuantizationType.Q4_1
        return [BlockWeight(FORMATS[kind], gguf.quantize(widen(weight), kind))]
