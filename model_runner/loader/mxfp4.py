"""Weights in MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS's safetensors have them: dequantised.

A row is blocks of 32 weights of 4 bits, with a power of two for each block; in each byte, the lower half comes first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of the two tensors of a weight end."""
WEIGHTS_A_BYTE = 2
BLOCK_BYTES = 16
BIAS = 127
"""Bias of the exponents."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the fourth is the sign."""


Bytes = npt.NDArray[np.uint8]


def dequantise(blocks: Bytes, scales: Bytes) -> npt.NDArray[np.float32]:
    """Return MXFP4 values as float32 [..., K]: ``blocks`` [..., K / 32, 16], ``scales`` [..., K / 32]."""
    table = np.array([*VALUES, *(-value for value in VALUES)], dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.exp2(np.arange(256) - BIAS).astype(np.float32)
        halves = np.stack((blocks & 0xF, blocks >> 4), -1)
        values = table[halves] * powers[scales][..., None, None]
    return values.reshape(*scales.shape[:-1], -1)
