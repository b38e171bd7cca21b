"""Linear weights that keep the few bits of their checkpoint, and their dequantised values.

Shapes: O outputs (rows), I inputs (columns), S scales along a row, G groups of columns that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COLUMNS = 128
"""Columns per FP8 block that share a scale, in weights that are not scaled by row; the same for activations."""
HALF = 64
"""Number of bytes per group of packed columns: HALF columns in the lower halves, the next HALF in the upper ones."""
SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True)
class FP8Weight:
    """E4M3 with scales: of a row, or of a block of ``rows`` by COLUMNS, the last ones cut.

    ``eight``: activations become FP8, too (W8A8), with scales as the weight's blocks, or one a token.
    """

    values: Tensor
    """[O, I] float8_e4m3fn"""
    scales: Tensor
    """[S, O / rows] float32; S is 1 where a row has one scale."""
    rows: int
    is_blocked: bool
    eight: bool

    @property
    def nbytes(self) -> int:
        """Bytes of memory that values and scales take."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def outputs(self) -> int:
        """Number of outputs (rows), O."""
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        """Number of inputs (columns), I."""
        return self.values.shape[1]

    @property
    def kind(self) -> str:
        """Name of the format, for logs."""
        return "FP8 (W8A8)" if self.eight else "FP8"

    def dequantise(self) -> Tensor:
        """Return the weight as float32 [O, I]."""
        scales_OS = self.scales.repeat_interleave(self.rows, 1)[:, : self.outputs].T
        if not self.is_blocked:
            return self.values.float() * scales_OS
        return self.values.float() * scales_OS.repeat_interleave(COLUMNS, 1)[:, : self.inputs]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Four bits: a number less its group's zero point, times its group's scale.

    HALF bytes hold ``2 * HALF`` columns: the first half in the lower bits, the second in the upper bits. So a kernel
    finds both in the bytes that it has loaded. The last columns may be padding.
    """

    halves: Tensor
    """[O, I / 2] uint8, I rounded up to ``2 * HALF``"""
    scales: Tensor
    """[G, O], of a float type"""
    zeros: Tensor | None
    """[G, O] uint8; None: all are SYMMETRIC_ZERO."""
    inputs: int
    group: int
    order: Tensor | None = None
    """[I] int64: which of the activations' elements each column is for; None: its own."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that numbers, scales, zero points and order take."""
        parts = (self.halves, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def outputs(self) -> int:
        """Number of outputs (rows), O."""
        return self.halves.shape[0]

    @property
    def kind(self) -> str:
        """Name of the format, for logs."""
        return "four bits"

    def dequantise(self) -> Tensor:
        """Return the weight as float32 [O, I], its columns in the checkpoint's order.

        Stored columns may be in another order, which ``order`` describes.
        """
        numbers = unpack_halves(self.halves, self.inputs).float()
        zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros.T.float().repeat_interleave(self.group, 1)
        weights = (numbers - zeros) * self.scales.T.float().repeat_interleave(self.group, 1)
        return weights if self.order is None else weights[:, self.order.argsort()]


PackedWeight = FP8Weight | Int4Weight


def pack_halves(numbers: Tensor) -> Tensor:
    """Pack ``numbers`` [O, I], all below 16, two to a byte, as ``Int4Weight.halves`` has them; pad columns with 0."""
    padded = torch.nn.functional.pad(numbers.to(torch.uint8), (0, -numbers.shape[1] % (2 * HALF)))
    blocks = padded.view(len(numbers), -1, 2, HALF)
    return (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).flatten(1)


def unpack_halves(halves: Tensor, inputs: int) -> Tensor:
    """Return the first ``inputs`` columns of numbers that ``pack_halves`` packed: [O, inputs] uint8."""
    blocks = halves.view(len(halves), -1, 1, HALF)
    return torch.cat((blocks & 0xF, blocks >> 4), 2).flatten(1)[:, :inputs]
