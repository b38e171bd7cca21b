"""How a checkpoint's linear weights are packed, as its ``quantization_config`` says. Imports no torch.

Supported are FP8 (E4M3), AWQ, GPTQ, and compressed-tensors' integers of four bits. FP8 has a scale for a matrix, a row,
or a block (in DeepSeek-V3's form and compressed-tensors'). Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from .errors import unusable


class PackingKind(StrEnum):
    """How weights lie."""

    FP8 = "FP8"
    AWQ = "AWQ"
    GPTQ = "GPTQ"
    INT4 = "INT4"


GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Number to add to the zero points of each format; the first one has them less one."""


class Packing(NamedTuple):
    """``block``: rows and columns of a weight that share a scale of FP8; None: a matrix or a row does.
    ``zero_offset``: what is added to GPTQ's zero points.
    """

    kind: PackingKind
    block: tuple[int, int] | None = None
    zero_offset: int = 0


def read_packing(config: object) -> Packing | str:
    """Return how the weights of a ``quantization_config`` are packed, or as text the kind that cannot be read.

    Raises ``UnsupportedModel`` for a value of a wrong type or out of bounds.
    """
    config = _object("quantization_config", config)
    method = config.get("quant_method")
    if method == "fp8":
        return Packing(PackingKind.FP8, _block("weight_block_size", config.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(config)
    if method in ("awq", "gptq"):
        if config.get("bits") != 4:
            return f"{method} of {config.get('bits')!r} bits"
        return _awq(config) if method == "awq" else _gptq(config)
    return f"{method!r}"


def _awq(config: Mapping[str, Any]) -> Packing | str:
    version = _form(config, "version", "gemm")
    return Packing(PackingKind.AWQ) if version == "gemm" else f"awq in the version {version!r}"


def _gptq(config: Mapping[str, Any]) -> Packing | str:
    form = _form(config, "checkpoint_format", "gptq")
    if form not in GPTQ_ZERO_OFFSETS:
        return f"gptq in the format {form!r}"
    return Packing(PackingKind.GPTQ, zero_offset=GPTQ_ZERO_OFFSETS[form])


def _form(config: Mapping[str, Any], older: str, default: str) -> str:
    """Return the form of the files. It is that of the key ``older`` or, if this is missing, that of ``format``."""
    stated = config.get(older)
    return str(config.get("format", default) if stated is None else stated).lower()


def _compressed(config: Mapping[str, Any]) -> Packing | str:
    found: list[Packing] = []
    for name, stated in _object("config_groups", config.get("config_groups") or {}).items():
        group = _object(f"config_groups {name}", stated)
        weights = _object(f"config_groups {name} weights", group.get("weights") or {})
        kind = weights.get("type"), weights.get("num_bits")
        if kind == ("float", 8):
            block = weights.get("block_structure") if weights.get("strategy") == "block" else None
            found.append(Packing(PackingKind.FP8, _block("block_structure", block)))
        elif kind == ("int", 4) and _is_packed(config, group) and not group.get("input_activations"):
            found.append(Packing(PackingKind.INT4))
        else:
            return f"compressed-tensors in the format {config.get('format')!r}"
    if not found:
        return "compressed-tensors that name no groups"
    return found[0] if len(set(found)) == 1 else "compressed-tensors of several kinds"


def _is_packed(config: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    return (group.get("format") or config.get("format")) == "pack-quantized"


def _object(key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise unusable(key, value, "it must be an object")
    return value


def _block(key: str, value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise unusable(key, value, "it must be two sizes of 1 at least")
    return value[0], value[1]
