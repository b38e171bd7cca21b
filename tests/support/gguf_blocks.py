"""Random weights in GGUF's block formats, also in those that the gguf package reads but does not write."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

HALVES = {
    GGMLQuantizationType.Q4_0: (0,),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_0: (0,),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q8_0: (0,),
    GGMLQuantizationType.IQ4_NL: (0,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}
"""Where the float16 numbers of a block lie; every other byte may be anything."""


def random_blocks(
    kind: GGMLQuantizationType, n: int, k: int, rng: np.random.Generator, size: float = 1.0
) -> npt.NDArray[np.uint8]:
    """uint8 [n, bytes of k weights]: random bytes, and scales such that the weights' deviation is about ``size``."""
    weights, nbytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n, k // weights, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        blocks[..., at : at + 2] = np.ones((*blocks.shape[:2], 1), dtype=np.float16).view(np.uint8)
    measure = float(gguf.dequantize(blocks.reshape(-1, blocks.shape[1] * nbytes)[:64], kind).std())
    for at in HALVES[kind]:
        scales = (size / measure * rng.uniform(0.5, 1.5, (*blocks.shape[:2], 1))).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(n, -1)
