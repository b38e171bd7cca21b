"""Weights in MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS's safetensors have them: dequantised.

A row is blocks of 32 weights of 4 bits, with a power of two for each block; in each byte, the lower half comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of the two tensors of a weight end."""
WEIGHTS_A_BYTE = 2
BLOCK_BYTES = 16
BIAS = 127
"""Bias of the exponents."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the fourth is the sign."""


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return MXFP4 values as float32 [..., K]: ``blocks`` uint8 [..., K / 32, 16], ``scales`` uint8 [..., K / 32]."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    halves = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)
    values = torch.ldexp(table[halves.int()], scales[..., None].int() - BIAS)
    return values.flatten(-2)
