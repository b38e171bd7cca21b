"""Packed matrices as checkpoints have them, and several of them as the one weight that a linear layer multiplies by.

Shapes: O outputs (rows), I inputs (columns), R by C scales of FP8, G groups of columns that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .weights import COLUMNS, SYMMETRIC_ZERO, FP8Weight, Int4Weight, PackedWeight, pack_halves

ROWS = 128
"""Rows that share a scale in the most usual checkpoints in blocks."""
LEAST_GROUP = 32
"""Columns of four bits that a product takes at a time: groups are multiples of it."""

Rows = slice | Tensor


class FP8Matrix(NamedTuple):
    """``values`` [O, I] float8_e4m3fn; each of ``scales`` [R, C] float32 is of ``rows`` by ``columns`` of them, the
    last ones cut.
    """

    values: Tensor
    scales: Tensor
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs) of the matrix."""
        return self.values.shape[0], self.values.shape[1]

    def take(self, rows: Rows) -> FP8Matrix:
        """Return a matrix of some of the rows, in the order given, without dequantising it.

        ``rows``: a slice, or a tensor of row numbers.
        """
        values = self.values.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        if len(self.scales) == 1:
            return self._replace(values=values)
        return FP8Matrix(values, _spread(self.scales, 0, self.rows, self.shape[0])[rows], 1, self.columns)

    def take_columns(self, begin: int, end: int) -> FP8Matrix:
        """Return the matrix of the columns ``[begin, end)``, still packed. ``begin`` must be the begin of a block."""
        values = self.values[:, begin:end]
        if self.scales.shape[1] == 1:
            return FP8Matrix(values, self.scales, self.rows, end - begin)
        first, last = begin // self.columns, -(-end // self.columns)
        return self._replace(values=values, scales=self.scales[:, first:last])

    def elements(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return N single elements, dequantised: float32 [N].

        ``rows``, ``columns``: where they are, int64 [N] on the matrix's device.
        """
        found = self.values.view(torch.uint8)[rows, columns].view(torch.float8_e4m3fn)
        return found.float() * self.scales[rows // self.rows, columns // self.columns]

    def dequantise(self) -> Tensor:
        """Return the whole matrix in float32, [O, I]."""
        scales = _spread(_spread(self.scales, 0, self.rows, self.shape[0]), 1, self.columns, self.shape[1])
        return self.values.float() * scales


class Int4Matrix(NamedTuple):
    """Numbers below 16, less a zero point, times a scale. ``numbers`` [O, I] uint8, ``zeros`` [G, O] uint8, ``scales``
    [G, O] of a float type. ``groups`` int64 [I]: each column's; None: neighbours'.
    """

    numbers: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs) of the matrix."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.shape[1] // len(self.scales)

    def take(self, rows: Rows) -> Int4Matrix:
        """Return the matrix of these ``rows`` alone, in this order, still packed."""
        return Int4Matrix(self.numbers[rows], self.zeros[:, rows], self.scales[:, rows], self.groups)

    def take_columns(self, begin: int, end: int) -> Int4Matrix:
        """Return the matrix of the columns ``[begin, end)``, still packed; they must be whole groups of neighbours."""
        first, last = begin // self.group, end // self.group
        return Int4Matrix(self.numbers[:, begin:end], self.zeros[first:last], self.scales[first:last], None)

    def elements(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return N single elements, dequantised: float32 [N].

        ``rows``, ``columns``: where they are, int64 [N] on the matrix's device.
        """
        groups = columns // self.group if self.groups is None else self.groups[columns]
        zeros, scales = self.zeros[groups, rows].float(), self.scales[groups, rows].float()
        return (self.numbers[rows, columns].float() - zeros) * scales

    def dequantise(self) -> Tensor:
        """Return the whole matrix in float32, [O, I]."""
        zeros, scales = (part.T.float() for part in (self.zeros, self.scales))
        if self.groups is None:
            zeros, scales = (part.repeat_interleave(self.group, 1) for part in (zeros, scales))
        else:
            zeros, scales = zeros[:, self.groups], scales[:, self.groups]
        return (self.numbers.float() - zeros) * scales


PackedMatrix = FP8Matrix | Int4Matrix


def join(parts: Sequence[PackedMatrix], *, eight: bool) -> PackedWeight:
    """Stack packed matrices of one kind by rows to the one weight that a linear layer multiplies with.

    They have equal numbers of columns and equal groups of columns. ``eight``: whether products round activations to FP8
    as well; it counts for FP8 matrices alone.
    """
    in_fp8 = [part for part in parts if isinstance(part, FP8Matrix)]
    return _join_fp8(in_fp8, eight) if in_fp8 else _join_int4([p for p in parts if isinstance(p, Int4Matrix)])


def _join_fp8(parts: Sequence[FP8Matrix], eight: bool) -> FP8Weight:
    inputs = parts[0].shape[1]
    is_blocked = any(part.scales.shape[1] > 1 for part in parts)
    count = -(-inputs // COLUMNS) if is_blocked else 1
    scales_SO = torch.cat([_by_row(part, count) for part in parts], 1)
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    rows = 1
    # What rows share is kept once where all do: it is read with every tile of them.
    padded = torch.cat((scales_SO, scales_SO[:, -1:].expand(-1, -scales_SO.shape[1] % ROWS)), 1)
    blocks = padded.view(count, -1, ROWS)
    if bool((blocks == blocks[..., :1]).all()):
        scales_SO, rows = blocks[..., 0], ROWS
    return FP8Weight(values, scales_SO.contiguous(), rows, is_blocked, eight)


def _join_int4(parts: Sequence[Int4Matrix]) -> Int4Weight:
    zeros = torch.cat([part.zeros for part in parts], 1).contiguous()
    numbers, scales = torch.cat([part.numbers for part in parts]), torch.cat([part.scales for part in parts], 1)
    first = parts[0]
    # A product reads the columns that share a scale side by side.
    order = None if first.groups is None else first.groups.argsort(stable=True)
    if order is not None:
        numbers = numbers[:, order]
    is_symmetric = bool((zeros == SYMMETRIC_ZERO).all())
    zeros_or_none = None if is_symmetric else zeros
    halves = pack_halves(numbers).contiguous()
    return Int4Weight(halves, scales.contiguous(), zeros_or_none, first.shape[1], first.group, order)


def _by_row(matrix: FP8Matrix, count: int) -> Tensor:
    """Return the scale of each row in each of ``count`` blocks of COLUMNS columns: [count, O].

    A scale that rows or blocks share is repeated for each of them.
    """
    scales = _spread(matrix.scales, 0, matrix.rows, matrix.shape[0]).expand(matrix.shape[0], -1)
    return _spread(scales, 1, matrix.columns // COLUMNS, count).expand(-1, count).T


def _spread(scales: Tensor, axis: int, times: int, size: int) -> Tensor:
    """Repeat each scale ``times`` times along ``axis``, and cut the result to ``size``.

    A single scale is not repeated.
    """
    if scales.shape[axis] == 1:
        return scales
    return scales.repeat_interleave(times, axis).narrow(axis, 0, size)
