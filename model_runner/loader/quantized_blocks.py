"""Weights in GGUF's block formats, for kernels that multiply with the blocks as they are.

A weight [N, K] is N rows of K / 32 blocks. Rows can be put in any order and below each other; blocks stay whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Literal, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ...model_files.config import ModelConfig
from ...model_files.errors import UnsupportedModel
from ...model_files.model_path import ModelSource
from .gguf_weights import GGUFWeights

BLOCK = 32
HEAD_NAMES = ("lm_head.weight", "model.embed_tokens.weight")


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

    @abstractmethod
    def find(self, names: Sequence[str], weight: Tensor) -> BlockWeight | None:
        """The weights ``names``, one below the other, in one format; None where they are not to be had so.

        ``weight`` is the same in a float type, [N, K].
        """


class GGUFBlocks(BlockSource):
    """The blocks of a GGUF file."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._blocks = GGUFWeights(path, config).blocks(FORMATS)

    def find(self, names: Sequence[str], weight: Tensor) -> BlockWeight | None:
        """See the base class; a tied head is found under the embedding's name."""
        if names[0] == HEAD_NAMES[0] and HEAD_NAMES[0] not in self._blocks:
            names = HEAD_NAMES[1:]
        parts = [self._blocks[name] for name in names if name in self._blocks]
        if len(parts) < len(names) or len({kind for kind, _ in parts}) > 1:
            return None
        blocks = parts[0][1] if len(parts) == 1 else np.concatenate([blocks for _, blocks in parts])
        return BlockWeight(FORMATS[parts[0][0]], np.ascontiguousarray(blocks))


class RoundedBlocks(BlockSource):
    """Weights rounded here, to ``bits``; the head always to 8, as every answer goes through it."""

    def __init__(self, bits: Literal[4, 8]) -> None:
        self._bits = bits

    def find(self, names: Sequence[str], weight: Tensor) -> BlockWeight | None:
        """See the base class; None where K is not whole blocks."""
        if weight.shape[1] % BLOCK:
            return None
        eight = self._bits == 8 or names[0] in HEAD_NAMES
        kind = GGMLQuantizationType.Q8_0 if eight else GGMLQuantizationType.Q4_1
        return BlockWeight(FORMATS[kind], gguf.quantize(weight.to(torch.float32).numpy(), kind))


def open_blocks(
    quantization: Literal["none", "gguf", "int8", "int4"], source: ModelSource, config: ModelConfig
) -> BlockSource | None:
    """What ``--quantization`` means for the model at ``source``; raises ``UnsupportedModel``."""
    match quantization:
        case "none":
            return None
        case "int8":
            return RoundedBlocks(8)
        case "int4":
            return RoundedBlocks(4)
    if source.kind != "gguf":
        raise UnsupportedModel("--quantization gguf serves the blocks of a .gguf file; use int8 or int4 for this model")
    return GGUFBlocks(source.path, config)
