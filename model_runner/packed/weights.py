"""Linear weights that stay as few bits as their checkpoint has, and what each of them comes to.

Shapes: O outputs (rows), I inputs (columns), S scales along a row, G groups of columns that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COLUMNS = 128
"""Columns of a block of FP8 that share a scale, where not all of a row do; those of an activation are as many."""
HALF = 64
"""Columns of the lower halves of so many bytes, in front of those of the upper halves."""
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
        """Of memory."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def outputs(self) -> int:
        """O."""
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        """I."""
        return self.values.shape[1]

    @property
    def kind(self) -> str:
        """For a log."""
        return "FP8 (W8A8)" if self.eight else "FP8"

    def dequantise(self) -> Tensor:
        """[O, I] float32."""
        scales_OS = self.scales.repeat_interleave(self.rows, 1)[:, : self.outputs].T
        if not self.is_blocked:
            return self.values.float() * scales_OS
        return self.values.float() * scales_OS.repeat_interleave(COLUMNS, 1)[:, : self.inputs]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Four bits: a number less its group's zero point, times its group's scale.

    Of ``2 * HALF`` columns the first half lies in the lower bits of HALF bytes, the other in the upper ones, so that a
    kernel finds both in the bytes that it has loaded. The last columns may be padding.
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
        """Of memory."""
        parts = (self.halves, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def outputs(self) -> int:
        """O."""
        return self.halves.shape[0]

    @property
    def kind(self) -> str:
        """For a log."""
        return "four bits"

    def dequantise(self) -> Tensor:
        """[O, I] float32, in the order of activations."""
        numbers = unpack_halves(self.halves, self.inputs).float()
        zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros.T.float().repeat_interleave(self.group, 1)
        weights = (numbers - zeros) * self.scales.T.float().repeat_interleave(self.group, 1)
        return weights if self.order is None else weights[:, self.order.argsort()]


PackedWeight = FP8Weight | Int4Weight


def pack_halves(numbers: Tensor) -> Tensor:
    """``numbers`` [O, I] below 16, as ``Int4Weight.halves``."""
    padded = torch.nn.functional.pad(numbers.to(torch.uint8), (0, -numbers.shape[1] % (2 * HALF)))
    blocks = padded.view(len(numbers), -1, 2, HALF)
    return (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).flatten(1)


def unpack_halves(halves: Tensor, inputs: int) -> Tensor:
    """What ``pack_halves`` was given, of so many columns: uint8."""
    blocks = halves.view(len(halves), -1, 1, HALF)
    return torch.cat((blocks & 0xF, blocks >> 4), 2).flatten(1)[:, :inputs]
