"""Linear weights in FP8, or in four bits by AWQ (Lin et al., 2023), GPTQ (Frantar et al., 2022) or compressed-tensors,
as files have them. A weight is a number of a few bits, less a zero point, times a scale.

A weight's tensors have its name and an ending: of FP8 ``weight`` and ``weight_scale`` or ``weight_scale_inv`` (both
are what is multiplied by); of four bits those of ``FOUR_BITS``.

Shapes: O rows (outputs), I columns (inputs) of a weight, G groups of columns that share scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...model_files.errors import InvalidWeights
from ...model_files.packed_names import FOUR_BITS, SCALES_OF_FP8, weight_name
from ...model_files.packing import Packing, PackingKind
from ..ops.packed.matrices import FP8Matrix, Int4Matrix, PackedMatrix
from ..ops.packed.weights import SYMMETRIC_ZERO

BITS, A_WORD = 4, 8
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of a word's places each of eight neighbouring outputs lies."""

Read = Callable[[str], Tensor | None]
"""A tensor by its name in the files; None where there is none."""


def unpacked(name: str, tensor: Tensor, packing: Packing, read: Read) -> tuple[str, Tensor]:
    """Return the weight's own name and its dequantised values ([O, I] float32).

    ``read`` returns a tensor by name, such as the scales, or None. A tensor that is not packed is returned unchanged.
    Raises ``InvalidWeights``.
    """
    found = packed_matrix(name, tensor, packing, read)
    return (name, tensor) if found is None else (weight_name(name), found.dequantise())


def packed_matrix(name: str, tensor: Tensor, packing: Packing, read: Read) -> PackedMatrix | None:
    """Return the packed matrix with the numbers in ``tensor``, or None if these are not packed.

    ``read`` returns the scales, zero points and groups by their names, on the device of ``tensor``, or None if missing.
    Raises ``InvalidWeights``.
    """
    endings = FOUR_BITS.get(packing.kind)
    if endings is not None and name.endswith(endings.numbers):
        prefix = name.removesuffix(endings.numbers)
        scales = _needed(read, prefix + endings.scales)
        if packing.kind is PackingKind.INT4:
            return int4(tensor, read(prefix + endings.zeros), scales, read(prefix + endings.groups))
        zeros = _needed(read, prefix + endings.zeros)
        if packing.kind is PackingKind.AWQ:
            return awq(tensor, zeros, scales)
        return gptq(tensor, zeros, scales, read(prefix + endings.groups), packing.zero_offset)
    if packing.kind is PackingKind.FP8 and tensor.dtype == torch.float8_e4m3fn:
        prefix = name.removesuffix(".weight")
        found = next((scale for ending in SCALES_OF_FP8 if (scale := read(prefix + ending)) is not None), None)
        if found is None:
            raise InvalidWeights(f"the checkpoint lacks {prefix + SCALES_OF_FP8[1]!r}")
        return fp8(name, tensor, found, packing.block)
    return None


def fp8(name: str, weight: Tensor, scales: Tensor, block: tuple[int, int] | None) -> FP8Matrix:
    """Return the FP8 matrix of a weight and its scales. Raises ``InvalidWeights`` if these don't fit.

    ``scales``: one for the matrix, one for each row ([O] or [O, 1]), or one for each ``block`` of rows and columns. The
    last blocks may be cut. ``name``: for the message.
    """
    scales, (outputs, inputs) = scales.float(), weight.shape
    if scales.numel() == 1:
        return FP8Matrix(weight, scales.reshape(1, 1), outputs, inputs)
    counts = block and [-(-size // part) for size, part in zip(weight.shape, block, strict=True)]
    if block is not None and list(scales.shape) == counts:
        return FP8Matrix(weight, scales, *block)
    if scales.numel() == outputs and scales.shape[0] == outputs:
        return FP8Matrix(weight, scales.reshape(-1, 1), 1, inputs)
    of = f" of {block}" if block is not None else ""
    raise InvalidWeights(f"{name!r} has shape {list(weight.shape)}, and {list(scales.shape)} scales{of}")


def awq(words: Tensor, zeros: Tensor, scales: Tensor) -> Int4Matrix:
    """Return the matrix of a weight as AWQ stores it; its groups are neighbouring columns.

    ``words``: the weight, eight 4-bit numbers in each int32, [I, O / 8]. ``zeros``: zero points packed alike, [G, O /
    8]. ``scales``: [G, O].
    """
    order = torch.tensor(AWQ_ORDER, device=words.device)
    numbers_IO, zeros_GO = (_parts(packed)[..., order].flatten(-2) for packed in (words, zeros))
    _check(numbers_IO.shape, zeros_GO.shape, scales.shape)
    return Int4Matrix(numbers_IO.T.contiguous(), zeros_GO, scales, None)


def gptq(words: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, zero_offset: int) -> Int4Matrix:
    """Return the matrix of a weight as GPTQ stores it.

    ``words``: the weight, eight 4-bit numbers in each int32, [I / 8, O]. ``zeros``: zero points packed alike, [G, O /
    8]. ``scales``: [G, O]. ``groups``: the group of each column ([I]), or None if groups are neighbouring columns.
    ``zero_offset``: number to add to stored zero points.
    """
    numbers, zeros_GO = _parts(words.T).flatten(-2), _parts(zeros).flatten(-2) + zero_offset
    return _in_groups(numbers, zeros_GO, scales, groups)


def int4(words: Tensor, zeros: Tensor | None, scales: Tensor, groups: Tensor | None) -> Int4Matrix:
    """Return the matrix of a weight as compressed-tensors stores it.

    ``words``: the weight, eight 4-bit numbers in each int32, [O, I / 8]. ``zeros``: zero points packed alike, [O / 8,
    G], or None if all are SYMMETRIC_ZERO. Numbers and zero points are stored higher than their values, by the same
    amount. ``scales``: [O, G]. ``groups``: as in ``gptq``.
    """
    numbers, scales_GO = _parts(words).flatten(-2), scales.T
    if zeros is None:
        zeros_GO = torch.full(scales_GO.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=words.device)
    else:
        zeros_GO = _parts(zeros.T).flatten(-2)
    return _in_groups(numbers, zeros_GO, scales_GO, groups)


def _in_groups(numbers: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None) -> Int4Matrix:
    inputs = numbers.shape[1]
    _check(numbers.T.shape, zeros.shape, scales.shape)
    if groups is not None:
        groups = groups.long()
        if len(groups) != inputs or not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
            raise InvalidWeights(f"{len(groups)} columns of {len(scales)} groups, there are {inputs}")
        if torch.equal(groups, torch.arange(inputs, device=groups.device) // (inputs // len(scales))):
            groups = None
    return Int4Matrix(numbers, zeros, scales, groups)


def _parts(words: Tensor) -> Tensor:
    """Return the eight 4-bit numbers of each int32 word, the lowest bits first: uint8 [..., 8]."""
    places = torch.arange(A_WORD, dtype=torch.int32, device=words.device) * BITS
    return ((words[..., None] >> places) & 0xF).to(torch.uint8)


def _check(values: torch.Size, zeros: torch.Size, scales: torch.Size) -> None:
    if not (zeros == scales and values[1] == scales[1] and len(scales) and values[0] % scales[0] == 0):
        raise InvalidWeights(f"weights {list(values)}, zero points {list(zeros)}, scales {list(scales)} don't fit")


def _needed(read: Read, name: str) -> Tensor:
    tensor = read(name)
    if tensor is None:
        raise InvalidWeights(f"the checkpoint lacks {name!r}")
    return tensor
