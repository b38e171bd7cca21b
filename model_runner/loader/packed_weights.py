"""Linear weights in FP8, or in four bits by AWQ (Lin et al., 2023) or GPTQ (Frantar et al., 2022): dequantised as they
are read, whatever computes with them then. A weight is a number of a few bits, less a zero point, times a scale.

A weight's tensors have its name and an ending: of FP8 ``weight`` and ``weight_scale`` or ``weight_scale_inv`` (both
are what is multiplied by); of AWQ and GPTQ ``qweight``, ``qzeros``, ``scales`` and, of GPTQ, ``g_idx``.

Shapes: O rows (outputs), I columns (inputs) of a weight, G groups of columns that share scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...model_files.errors import InvalidWeights
from ...model_files.packing import Packing, PackingKind

SCALES_OF_FP8 = (".weight_scale_inv", ".weight_scale")
BESIDE = (*SCALES_OF_FP8, ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".qzeros", ".scales", ".g_idx")
"""What goes with a weight: read with it, or, where it is of activations and of KV, not at all."""
PACKED = ".qweight"
BITS, A_WORD = 4, 8
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of a word's places each of eight neighbouring outputs lies."""

Read = Callable[[str], Tensor | None]
"""A tensor by its name in the files; None where there is none."""


def is_beside(name: str) -> bool:
    """Whether the tensor is no weight itself."""
    return name.endswith(BESIDE)


def unpacked(name: str, tensor: Tensor, packing: Packing, read: Read) -> tuple[str, Tensor]:
    """The weight's own name, and [O, I] float32; what is not packed comes as it is. Raises ``InvalidWeights``."""
    if name.endswith(PACKED) and packing.kind in (PackingKind.AWQ, PackingKind.GPTQ):
        prefix = name.removesuffix(PACKED)
        zeros, scales = (_needed(read, prefix + ending) for ending in (".qzeros", ".scales"))
        if packing.kind is PackingKind.AWQ:
            return f"{prefix}.weight", awq(tensor, zeros, scales)
        return f"{prefix}.weight", gptq(tensor, zeros, scales, read(f"{prefix}.g_idx"), packing.zero_offset)
    if packing.kind is PackingKind.FP8 and tensor.dtype == torch.float8_e4m3fn:
        prefix = name.removesuffix(".weight")
        found = next((scale for ending in SCALES_OF_FP8 if (scale := read(prefix + ending)) is not None), None)
        if found is None:
            raise InvalidWeights(f"the checkpoint lacks {prefix + SCALES_OF_FP8[1]!r}")
        return name, fp8(name, tensor, found, packing.block)
    return name, tensor


def fp8(name: str, weight: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """``scales``: one, one a row [O] or [O, 1], or one a ``block`` of rows and columns, the last ones cut."""
    wide, scales = weight.float(), scales.float()
    if scales.numel() == 1:
        return wide * scales.reshape(())
    if block is None or scales.dim() < 2 or scales.shape[1] == 1:
        if scales.numel() != len(weight):
            raise InvalidWeights(f"{name!r} has {len(weight)} rows, and {list(scales.shape)} scales")
        return wide * scales.reshape(-1, 1)
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    if tuple(scales.shape) != (rows, columns):
        raise InvalidWeights(f"{name!r} has shape {list(weight.shape)}, and {list(scales.shape)} scales of {block}")
    whole = scales.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)
    return wide * whole[:, : weight.shape[1]]


def awq(words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """``words`` int32 [I, O / 8], ``zeros`` int32 [G, O / 8], ``scales`` [G, O]: groups are neighbouring columns."""
    order = torch.tensor(AWQ_ORDER)
    values_IO, zeros_GO = (_parts(packed)[..., order].flatten(-2) for packed in (words, zeros))
    _check(values_IO.shape, zeros_GO.shape, scales.shape)
    size = len(values_IO) // len(scales)
    wide_IO = values_IO.float() - zeros_GO.float().repeat_interleave(size, 0)
    return (wide_IO * scales.float().repeat_interleave(size, 0)).T.contiguous()


def gptq(words: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, zero_offset: int) -> Tensor:
    """``words`` int32 [I / 8, O], ``zeros`` int32 [G, O / 8], ``scales`` [G, O]; ``groups`` [I]: each column's, None:
    neighbours'.
    """
    values_IO = _parts(words.T).flatten(-2).T
    zeros_GO = _parts(zeros).flatten(-2) + zero_offset
    _check(values_IO.shape, zeros_GO.shape, scales.shape)
    inputs = len(values_IO)
    group_I = torch.arange(inputs) // (inputs // len(scales)) if groups is None else groups.long()
    if len(group_I) != inputs or not 0 <= int(group_I.min()) <= int(group_I.max()) < len(scales):
        raise InvalidWeights(f"{len(group_I)} columns of {len(scales)} groups, there are {inputs}")
    wide_IO = values_IO.float() - zeros_GO.float()[group_I]
    return (wide_IO * scales.float()[group_I]).T.contiguous()


def _parts(words: Tensor) -> Tensor:
    """[..., 8]: the numbers in each word, the lowest bits first."""
    return (words[..., None] >> (torch.arange(A_WORD, dtype=torch.int32) * BITS)) & 0xF


def _check(values: torch.Size, zeros: torch.Size, scales: torch.Size) -> None:
    if not (zeros == scales and values[1] == scales[1] and len(scales) and values[0] % scales[0] == 0):
        raise InvalidWeights(f"weights {list(values)}, zero points {list(zeros)}, scales {list(scales)} don't fit")


def _needed(read: Read, name: str) -> Tensor:
    tensor = read(name)
    if tensor is None:
        raise InvalidWeights(f"the checkpoint lacks {name!r}")
    return tensor
