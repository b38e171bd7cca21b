"""Checkpoints in FP8, AWQ, GPTQ and INT4: packed here as their makers do, and read back to the last bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.packed_checkpoints import FORMS, ROWS, TENSORS, WORDS, packed_checkpoint

from pdserve.model_files.checkpoint import tensor_sizes
from pdserve.model_files.errors import InvalidWeights, UnsupportedModel
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.packed_names import refuse_stray_scales
from pdserve.model_files.packing import Packing, PackingKind, read_packing
from tests.unit.model_files.test_model_loading import MODELS, load

INT4, WEIGHTS = TENSORS | {"format": "pack-quantized"}, WORDS["group_0"]["weights"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    MODELS["qwen3"]().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_what_was_packed_is_read_back(plain: Path, tmp_path: Path, caplog, form: str) -> None:
    source, exact, _ = packed_checkpoint(plain, tmp_path, form)
    with caplog.at_level(logging.WARNING):
        ours = load(source)[1]
    assert f"weights in {read_packing(FORMS[form]).kind} are dequantised" in caplog.text
    theirs = load(exact)[1]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    if not form.startswith("fp8"):
        counts = [sum(size.values for size in tensor_sizes(each)) for each in (source, exact)]
        assert counts[0] == counts[1]


def test_scales_may_lie_in_another_file(plain: Path, tmp_path: Path) -> None:
    source, exact, stored = packed_checkpoint(plain, tmp_path, "fp8 rows")
    scales = {name: tensor for name, tensor in stored.items() if name.endswith("scale")}
    rest = {name: tensor for name, tensor in stored.items() if name not in scales}
    (source.path / "model.safetensors").unlink()
    for file, tensors in (("one.safetensors", rest), ("other.safetensors", scales)):
        save_file(tensors, source.path / file)
    weight_map = {name: "other.safetensors" if name in scales else "one.safetensors" for name in stored}
    (source.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ours, theirs = load(source)[1], load(exact)[1]
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


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
    source, _, stored = packed_checkpoint(plain, tmp_path, form)
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
        (TENSORS | {"config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}}}, "compressed-tensors in"),
        (INT4 | {"config_groups": {"g": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}}}, "pack-quantized"),
        (INT4 | {"config_groups": WORDS | {"g": ROWS["group_0"]}}, "several kinds"),
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


@pytest.mark.parametrize(
    ("form", "ending", "change", "message"),
    [
        ("fp8 blocks", ".weight", lambda t: t.float().to(torch.float8_e5m2), r"q_proj\.weight' is of F8_E5M2"),
        ("fp8 blocks", ".weight", lambda t: t.to(torch.bfloat16), r"q_proj\.weight' is of BF16"),
        ("fp8 rows", ".weight", lambda t: t.float(), r"q_proj\.weight' is of F32"),
        ("fp8 rows", ".weight_scale_inv", torch.ones(1), "in FP8 is read without it"),
        ("awq", ".g_idx", torch.zeros(64), "in AWQ is read without it"),
        ("gptq", ".weight_scale", torch.ones(1), "in GPTQ is read without it"),
        ("int4 symmetric", ".qzeros", torch.ones(1), "in INT4 is read without it"),
        ("int4 symmetric", ".weight_packed", None, r"there is no .*q_proj\.weight_packed'"),
    ],
)
def test_a_scale_that_no_packed_weight_takes_is_refused(plain, tmp_path, form, ending, change, message) -> None:
    source, _, stored = packed_checkpoint(plain, tmp_path, form)
    refuse_stray_scales(source.path)
    name = "model.layers.0.self_attn.q_proj" + ending
    tensor = stored.pop(name, None)
    if change is not None:
        stored[name] = change if isinstance(change, torch.Tensor) else change(tensor)
    save_file(stored, source.path / "model.safetensors")
    for read in (load, lambda source: refuse_stray_scales(source.path)):
        with pytest.raises(InvalidWeights, match=f"packed holds '.*q_proj.*{message}"):
            read(source)


@pytest.mark.parametrize(
    ("fields", "offset"),
    [
        ({}, 1),
        ({"format": "gptq_v2"}, 0),
        ({"format": "GPTQ_V2", "checkpoint_format": None}, 0),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
    ],
)
def test_the_format_of_gptq_says_what_zero_points_lack(fields, offset: int) -> None:
    assert read_packing({"quant_method": "gptq", "bits": 4, **fields}) == Packing(PackingKind.GPTQ, None, offset)


def test_the_version_of_awq_comes_before_its_format() -> None:
    awq = {"quant_method": "awq", "bits": 4}
    assert read_packing(awq | {"format": "gemv", "version": "GEMM"}) == Packing(PackingKind.AWQ)
    assert read_packing(awq | {"format": "gemv", "version": None}) == "awq in the version 'gemv'"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config 'fp8'"),
        (["fp8"], r"quantization_config \['fp8'\]"),
        *(({"quant_method": "fp8", "weight_block_size": size}, "weight_block_size") for size in ([0, 0], [16], "128")),
        (TENSORS | {"config_groups": [1]}, r"config_groups \[1\]"),
        (TENSORS | {"config_groups": {"g": "x"}}, "config_groups g 'x'"),
        (TENSORS | {"config_groups": {"g": {"weights": "x"}}}, "config_groups g weights 'x'"),
    ],
)
def test_a_broken_quantisation_is_refused_by_its_key(plain, tmp_path, config, message: str) -> None:
    raw = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}.* can't be used: it must be .*; correct it"):
        load(ModelSource("hf", tmp_path))
