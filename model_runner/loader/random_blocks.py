"""Random weights in GGUF's block formats, also in those that the gguf package reads and does not write."""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


class Halves(NamedTuple):
    """Where the float16 numbers of a block lie, by byte, and how many times the block's scale they are.

    Every other byte may be anything. Minima are such that the weights' mean is about zero.
    """

    at: tuple[int, ...]
    factors: tuple[float, ...]


HALVES = {
    GGMLQuantizationType.Q4_0: Halves((0,), (1.0,)),
    GGMLQuantizationType.Q4_1: Halves((0, 2), (1.0, -7.5)),
    GGMLQuantizationType.Q5_0: Halves((0,), (1.0,)),
    GGMLQuantizationType.Q5_1: Halves((0, 2), (1.0, -15.5)),
    GGMLQuantizationType.Q8_0: Halves((0,), (1.0,)),
    GGMLQuantizationType.IQ4_NL: Halves((0,), (1.0,)),
    GGMLQuantizationType.Q4_K: Halves((0, 2), (1.0, 7.5)),
    GGMLQuantizationType.Q5_K: Halves((0, 2), (1.0, 15.5)),
    GGMLQuantizationType.Q6_K: Halves((208,), (1.0,)),
}


def random_blocks(
    kind: GGMLQuantizationType, n: int, k: int, rng: np.random.Generator, size: float = 1.0, *, signed: bool = False
) -> npt.NDArray[np.uint8]:
    """Return random blocks of a GGUF format, uint8 [n, bytes of k weights].

    The weights' standard deviation is about ``size``. ``signed``: whether half of the scales are negative, so that the
    weights' mean is zero although that of the kind's numbers is not.
    """
    weights, nbytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n, k // weights, nbytes), dtype=np.uint8)
    _write_halves(blocks, HALVES[kind], np.ones((*blocks.shape[:2], 1)))
    measure = float(gguf.dequantize(blocks[:64].reshape(min(n, 64), -1), kind).std())
    scales = rng.uniform(0.5, 1.5, (*blocks.shape[:2], 1))
    if signed:
        scales *= rng.choice([-1.0, 1.0], scales.shape)
    _write_halves(blocks, HALVES[kind], size / measure * scales)
    return blocks.reshape(n, -1)


def _write_halves(blocks: npt.NDArray[np.uint8], halves: Halves, scales: npt.NDArray[np.float64]) -> None:
    for at, factor in zip(halves.at, halves.factors, strict=True):
        blocks[..., at : at + 2] = (scales * factor).astype(np.float16).view(np.uint8)
