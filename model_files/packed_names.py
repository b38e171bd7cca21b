"""Names of a packed weight's tensors in safetensors files, and scales that belong to no packed weight.

A weight's tensors have its name and an ending. In FP8, these are ``weight`` and ``weight_scale`` or
``weight_scale_inv``, which both are what is multiplied by. In four bits, they are those of ``FOUR_BITS``. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .checkpoint import tensor_types
from .errors import InvalidWeights, UnsupportedModel
from .json_file import read_optional_object
from .packing import Packing, PackingKind, read_packing


class Endings(NamedTuple):
    """Endings of the names of a weight's tensors; ``groups`` may be missing, and so may ``zeros`` of INT4."""

    numbers: str
    scales: str
    zeros: str
    groups: str


FOUR_BITS = {
    PackingKind.AWQ: Endings(".qweight", ".scales", ".qzeros", ".g_idx"),
    PackingKind.GPTQ: Endings(".qweight", ".scales", ".qzeros", ".g_idx"),
    PackingKind.INT4: Endings(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
}
SCALES_OF_FP8 = (".weight_scale_inv", ".weight_scale")
OF_WEIGHTS = (*SCALES_OF_FP8, ".qzeros", ".scales", ".g_idx", ".weight_zero_point", ".weight_g_idx", ".weight_shape")
"""What goes with a weight and is read with it; the last ones are compressed-tensors'."""
NOT_READ = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
"""Scales of activations and of KV, which are not quantised here."""


def is_beside(name: str) -> bool:
    """Return whether the tensor only goes with a weight: scales (of weights, activations or KV), zeros, groups."""
    return name.endswith(OF_WEIGHTS + NOT_READ)


def weight_name(name: str) -> str:
    """Return the name of the weight that the packed numbers in tensor ``name`` belong to; other names are unchanged."""
    ending = next((endings.numbers for endings in FOUR_BITS.values() if name.endswith(endings.numbers)), None)
    return name if ending is None else f"{name.removesuffix(ending)}.weight"


def is_packed(name: str, dtype: str, packing: Packing) -> bool:
    """Return whether tensor ``name`` holds the numbers of a packed weight.

    ``dtype``: the tensor's type as safetensors calls it.
    """
    endings = FOUR_BITS.get(packing.kind)
    return dtype == "F8_E4M3" if endings is None else name.endswith(endings.numbers)


def packing_of(folder: Path) -> Packing | None:
    """Return how the weights in ``folder`` are packed, by its config.json, or None if they are not.

    None also means a packing that is not supported; ``spec_reader.py`` has refused such models before.
    """
    raw = read_optional_object(folder / "config.json", UnsupportedModel)
    text = raw.get("text_config")
    stated = raw.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    found = read_packing(stated or {})
    return found if isinstance(found, Packing) else None


def refuse_stray_scales(folder: Path) -> None:
    """Raise ``InvalidWeights`` if a file in ``folder`` has a weight's scale, zero point or group that nothing reads.

    Without it, the weight would have other values than its maker's. Reads headers alone.
    """
    packing = packing_of(folder)
    if packing is None:
        return
    types = tensor_types(folder)
    taken = {
        beside
        for name, dtype in types.items()
        if is_packed(name, dtype, packing)
        for beside in _read(name, packing, types)
    }
    for name in types:
        if name.endswith(OF_WEIGHTS) and name not in taken:
            raise InvalidWeights(
                f"{folder} holds {name!r}, but {_reason(name, packing, types)}; convert the model again, "
                "or take the plain one"
            )


def _read(name: str, packing: Packing, names: Container[str]) -> Iterator[str]:
    """Yield the names of what is read with the packed numbers in tensor ``name``."""
    endings = FOUR_BITS.get(packing.kind)
    if endings is None:
        prefix = name.removesuffix(".weight")
        yield next((prefix + ending for ending in SCALES_OF_FP8 if prefix + ending in names), "")
        return
    prefix = name.removesuffix(endings.numbers)
    yield from (prefix + endings.scales, prefix + endings.zeros)
    if packing.kind is not PackingKind.AWQ:
        yield prefix + endings.groups
    if packing.kind is PackingKind.INT4:
        yield f"{prefix}.weight_shape"


def _reason(name: str, packing: Packing, types: Mapping[str, str]) -> str:
    prefix = name[: name.rindex(".")]
    endings = FOUR_BITS.get(packing.kind)
    weight = prefix + (".weight" if endings is None else endings.numbers)
    if weight not in types:
        return f"there is no {weight!r} that it belongs to"
    if is_packed(weight, types[weight], packing):
        return f"{weight!r} in {packing.kind} is read without it"
    return f"{weight!r} is of {types[weight]}, which is read without it (FP8 is F8_E4M3)"
