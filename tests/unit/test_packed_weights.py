"""Checkpoints in FP8, AWQ and GPTQ: packed here as their makers do, and read back to the last bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.model_files.checkpoint import tensor_sizes
from pdserve.model_files.errors import InvalidWeights, UnsupportedModel
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.packing import Packing, PackingKind, read_packing
from tests.unit.test_model_loading import MODELS, load

GROUP = 32
FP8 = {"quant_method": "fp8"}
TENSORS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
ROWS = {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}
FORMS = {
    "fp8 blocks": FP8 | {"weight_block_size": [32, 48]},
    "fp8 matrix": FP8,
    "fp8 rows": TENSORS | {"config_groups": ROWS},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "gptq v2 by activation": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
}


def pack_words(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """``numbers`` [..., 8 N] of four bits as int32 [..., N]: number ``i`` of a word in its place ``order[i]``."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, 8).astype(np.uint32)
    words = sum(parts[..., i] << np.uint32(4 * order[i]) for i in range(8))
    return words.astype(np.uint32).view(np.int32)


def fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Elements, scales, and what they come to: block by block."""
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
    """The checkpoint's tensors, and the weight [O, I] that is in them."""
    rng, (rows, columns) = np.random.default_rng(len(name)), weight.shape
    if form.startswith("fp8"):
        block = {"fp8 blocks": (32, 48), "fp8 matrix": (rows, columns), "fp8 rows": (1, columns)}[form]
        elements, scales, exact = fp8(weight, block)
        ending = "weight_scale_inv" if form == "fp8 blocks" else "weight_scale"
        stored = {f"{name}.weight": elements, f"{name}.{ending}": scales.reshape(()) if "matrix" in form else scales}
        return stored | {f"{name}.input_scale": torch.ones(1)}, exact
    groups = columns // GROUP
    numbers, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(1, 16, (groups, rows))
    scales = rng.uniform(0.01, 0.1, (groups, rows)).astype(np.float16)
    group_of = np.arange(columns) // GROUP
    if form == "gptq v2 by activation":
        group_of = rng.permutation(group_of)
    exact = (numbers - zeros[group_of]).astype(np.float32) * scales.astype(np.float32)[group_of]
    stored = {"scales": scales}
    if form == "awq":
        # A word's places, from the lowest bits on, hold outputs 0, 2, 4, 6, 1, 3, 5, 7.
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        stored |= {"qweight": pack_words(numbers, order), "qzeros": pack_words(zeros, order)}
    else:
        stored["qweight"] = pack_words(numbers.T).T.copy()
        stored |= {"qzeros": pack_words(zeros - (form == "gptq")), "g_idx": group_of.astype(np.int32)}
    return {f"{name}.{ending}": torch.from_numpy(array) for ending, array in stored.items()}, exact.T


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    MODELS["qwen3"]().save_pretrained(folder)
    return folder


def packed(plain: Path, folder: Path, form: str) -> tuple[ModelSource, ModelSource, dict[str, torch.Tensor]]:
    """The packed checkpoint, the same weights in float32, and the packed one's tensors."""
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("proj.weight"):
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
    return ModelSource("hf", folder / "packed"), ModelSource("hf", folder / "exact"), stored


@pytest.mark.parametrize("form", FORMS)
def test_what_was_packed_is_read_back(plain: Path, tmp_path: Path, caplog, form: str) -> None:
    source, exact, _ = packed(plain, tmp_path, form)
    with caplog.at_level(logging.WARNING):
        ours = load(source)[1]
    assert f"weights in {read_packing(FORMS[form]).kind} are dequantised" in caplog.text
    theirs = load(exact)[1]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    if form.startswith(("awq", "gptq")):
        counts = [sum(size.values for size in tensor_sizes(each)) for each in (source, exact)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("form", "ending", "change", "message"),
    [
        ("fp8 matrix", ".weight_scale", None, "lacks .*q_proj.weight_scale'"),
        ("fp8 blocks", ".weight_scale_inv", lambda t: t[:1], "scales of"),
        ("fp8 rows", ".weight_scale", lambda t: t[:-1], "scales"),
        ("awq", ".qzeros", None, "lacks .*q_proj.qzeros'"),
        ("awq", ".scales", lambda t: t[:, :-8], "don't fit"),
        ("gptq", ".g_idx", lambda t: t + 9, "columns of"),
    ],
)
def test_what_does_not_fit_is_named(plain, tmp_path, form, ending, change, message) -> None:
    source, _, stored = packed(plain, tmp_path, form)
    name = next(name for name in stored if name.endswith("0.self_attn.q_proj" + ending))
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = change(tensor).contiguous()
    save_file(stored, source.path / "model.safetensors")
    with pytest.raises(InvalidWeights, match=message):
        load(source)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "gptq", "bits": 8}, "gptq of 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        (TENSORS | {"config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}}}, "compressed-tensors in"),
        (TENSORS | {"config_groups": {}}, "no groups"),
    ],
)
def test_other_forms_are_refused_by_name(plain, tmp_path, config, reason: str) -> None:
    raw = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=reason):
        load(ModelSource("hf", tmp_path))


def test_blocks_of_compressed_tensors_are_theirs() -> None:
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
    found = read_packing(TENSORS | {"config_groups": {"g": {"weights": weights}}})
    assert found == Packing(PackingKind.FP8, (128, 128))
