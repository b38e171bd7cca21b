"""How a checkpoint's linear weights are packed, as its ``quantization_config`` says. Imports no torch.

Supported are FP8 (E4M3), AWQ, GPTQ, and compressed-tensors' integers of four bits. FP8 has a scale for a matrix, a row,
or a block (in DeepSeek-V3's form and compressed-tensors'). Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class PackingKind(StrEnum):
    """How weights lie."""

    FP8 = "FP8"
    AWQ = "AWQ"
    GPTQ = "GPTQ"
    INT4 = "INT4"


class Packing(NamedTuple):
    """``block``: rows and columns of a weight that share a scale of FP8; None: a matrix or a row does.
    ``zero_offset``: what is added to GPTQ's zero points.
    """

    kind: PackingKind
    block: tuple[int, int] | None = None
    zero_offset: int = 0


def read_packing(config: Mapping[str, Any]) -> Packing | str:
    """Return how the weights of a ``quantization_config`` are packed, or as text the kind that cannot be read."""
    method = config.get("quant_method")
    if method == "fp8":
        block = config.get("weight_block_size")
        return Packing(PackingKind.FP8, None if block is None else (int(block[0]), int(block[1])))
    if method == "compressed-tensors":
        return _compressed(config)
    if method in ("awq", "gptq"):
        if config.get("bits") != 4:
            return f"{method} of {config.get('bits')} bits"
        if method == "awq":
            version = str(config.get("version", "gemm")).lower()
            return Packing(PackingKind.AWQ) if version == "gemm" else f"awq in the version {version!r}"
        # The first form of the files has zero points less one.
        return Packing(PackingKind.GPTQ, zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1)
    return f"{method!r}"


def _compressed(config: Mapping[str, Any]) -> Packing | str:
    found: list[Packing] = []
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        kind = weights.get("type"), weights.get("num_bits")
        block = weights.get("block_structure")
        if kind == ("float", 8):
            if weights.get("strategy") != "block":
                block = None
            found.append(Packing(PackingKind.FP8, (int(block[0]), int(block[1])) if block else None))
        elif kind == ("int", 4) and _is_packed(config, group) and not group.get("input_activations"):
            found.append(Packing(PackingKind.INT4))
        else:
            return f"compressed-tensors in the format {config.get('format')!r}"
    if not found:
        return "compressed-tensors that name no groups"
    return found[0] if len(set(found)) == 1 else "compressed-tensors of several kinds"


def _is_packed(config: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    return (group.get("format") or config.get("format")) == "pack-quantized"
