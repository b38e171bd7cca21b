"""Checkpoints in FP8, AWQ, GPTQ and INT4, packed as their makers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from pdserve.model_files.model_path import ModelSource

GROUP = 32
FP8 = {"quant_method": "fp8"}
TENSORS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
ROWS = {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}
WORDS = {"group_0": {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}}}
FORMS: dict[str, dict[str, Any]] = {
    "fp8 blocks": FP8 | {"weight_block_size": [32, 48]},
    "fp8 blocks of 128": FP8 | {"weight_block_size": [128, 128]},
    "fp8 matrix": FP8,
    "fp8 rows": TENSORS | {"config_groups": ROWS},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "gptq symmetric": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "int4 symmetric": TENSORS | {"format": "pack-quantized", "config_groups": WORDS},
    "int4 by activation": TENSORS | {"format": "pack-quantized", "config_groups": WORDS},
    "gptq v2 by activation": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
}


class PackedCheckpoint(NamedTuple):
    """``source``: with packed weights; ``exact``: the same in float32; ``stored``: the packed one's tensors."""

    source: ModelSource
    exact: ModelSource
    stored: dict[str, torch.Tensor]


def pack_words(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack ``numbers`` [..., 8 N] of four bits into int32 [..., N]. Number ``i`` of a word goes to ``order[i]``."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, 8).astype(np.uint32)
    words = sum(parts[..., i] << np.uint32(4 * order[i]) for i in range(8))
    return words.astype(np.uint32).view(np.int32)


def fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Quantise block by block. Returns elements, scales, and the values that they stand for."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    elements, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), np.empty((rows, columns), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = weight[part].abs().max() / 448
            elements[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[part] = elements[part].float().numpy() * scales[i, j].numpy()
    return elements, scales, exact


def pack(form: str, name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Return the checkpoint's tensors, and the weight [O, I] that they stand for."""
    rng, (rows, columns) = np.random.default_rng(len(name)), weight.shape
    if form.startswith("fp8"):
        block = tuple(FORMS[form].get("weight_block_size", (1 if form == "fp8 rows" else rows, columns)))
        elements, scales, exact = fp8(weight, block)
        ending = "weight_scale_inv" if "blocks" in form else "weight_scale"
        stored = {f"{name}.weight": elements, f"{name}.{ending}": scales.reshape(()) if "matrix" in form else scales}
        return stored | {f"{name}.input_scale": torch.ones(1)}, exact
    groups = columns // GROUP
    numbers, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(1, 16, (groups, rows))
    if form.endswith("symmetric"):
        zeros[:] = 8
    scales = rng.uniform(0.01, 0.1, (groups, rows)).astype(np.float16)
    group_of = np.arange(columns) // GROUP
    if form.endswith("by activation"):
        # By the activations, which all that is multiplied with them has in common.
        group_of = np.random.default_rng(columns).permutation(group_of)
    exact = (numbers - zeros[group_of]).astype(np.float32) * scales.astype(np.float32)[group_of]
    stored = {"scales": scales}
    if form.startswith("int4"):
        stored = {"weight_packed": pack_words(numbers.T).copy(), "weight_scale": scales.T.copy()}
        stored |= {"weight_shape": np.array([rows, columns])}
        if form == "int4 by activation":
            stored |= {"weight_zero_point": pack_words(zeros).T.copy(), "weight_g_idx": group_of.astype(np.int32)}
    elif form == "awq":
        # A word's places, from the lowest bits on, hold outputs 0, 2, 4, 6, 1, 3, 5, 7.
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        stored |= {"qweight": pack_words(numbers, order), "qzeros": pack_words(zeros, order)}
    else:
        stored["qweight"] = pack_words(numbers.T).T.copy()
        stored |= {"qzeros": pack_words(zeros - ("v2" not in form)), "g_idx": group_of.astype(np.int32)}
    return {f"{name}.{ending}": torch.from_numpy(array) for ending, array in stored.items()}, exact.T


def packed_checkpoint(plain: Path, folder: Path, form: str, plainly: tuple[str, ...] = ()) -> PackedCheckpoint:
    """Write the checkpoint ``plain`` in two folders within ``folder``: packed, and with the exact values of that.

    Projections with names that end in one of ``plainly`` are not packed.
    """
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("proj.weight", "mqa.weight")) and not name.endswith(plainly):
            parts, weight = pack(form, name.removesuffix(".weight"), tensor)
            stored |= parts
            exact[name] = torch.from_numpy(np.ascontiguousarray(weight))
        else:
            stored[name] = exact[name] = tensor
    config = json.loads((plain / "config.json").read_text())
    for part, tensors, more in (("packed", stored, {"quantization_config": FORMS[form]}), ("exact", exact, {})):
        (folder / part).mkdir()
        save_file(tensors, folder / part / "model.safetensors")
        (folder / part / "config.json").write_text(json.dumps(config | more))
    return PackedCheckpoint(ModelSource("hf", folder / "packed"), ModelSource("hf", folder / "exact"), stored)
