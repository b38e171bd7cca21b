"""Layers that keep their weights packed: the weights of a dequantised load, to the last bit, in less memory.

Without a product, which Triton has: ``tests/device/test_device_packed_model.py``.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.families import make_reference
from support.packed_checkpoints import FORMS, GROUP, packed_checkpoint
from support.rank_threads import make_ranks, together

from pdserve.model_files.errors import InvalidWeights, UnsupportedModel
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.packed_names import packing_of
from pdserve.model_files.packing import Packing, PackingKind
from pdserve.model_files.sharding import Shard, shard
from pdserve.model_files.spec import ModelSpec
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.loader import open_packed
from pdserve.model_runner.loader.fingerprint import fingerprint
from pdserve.model_runner.loader.load import load_model_weights
from pdserve.model_runner.loader.open_packed import choose_packed
from pdserve.model_runner.loader.packed_layers import PackedLayers
from pdserve.model_runner.loader.packed_sources import CheckpointMatrices, DummyMatrices
from pdserve.model_runner.models.decoder import Decoder
from pdserve.model_runner.models.experts import Experts
from pdserve.model_runner.ops.packed.matrices import FP8Matrix, join
from pdserve.model_runner.ops.packed.weights import FP8Weight, Int4Weight, PackedWeight
from pdserve.server.options import ServerOptions
from tests.unit.model_runner.test_rank_passes import run

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
SIZES = {"hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    # Neighbours rotate together, and a gate lies in one tensor with what it is multiplied by.
    "glm4": SIZES,
    "deepseek-v3": {"hidden_size": 96, "q_lora_rank": 64, "v_head_dim": 16, "n_shared_experts": 2}
    | {"moe_intermediate_size": 32, "intermediate_size": 128},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        make_reference(name, vocab_size=101, **MODELS[name]).save_pretrained(folder)
    return folders


class Loaded:
    """A model with its packed layers."""

    def __init__(self, source: ModelSource, rank: Shard | None = None, *, eight: bool = False) -> None:
        spec, packing = read_spec(source), packing_of(source.path)
        assert packing is not None
        self.model = make_model(spec, rank)
        matrices = CheckpointMatrices(source.path, spec, packing)
        self.packed = PackedLayers(self.model.linears(), matrices, DTYPE, CPU, product, rank, eight=eight)
        self.views = self.model.weights()
        samples = load_model_weights(self.views, source, spec, "auto", 0, shard=rank, packed=self.packed)
        self.fingerprint = fingerprint(spec, samples, self.packed.rounding)

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight as the dequantised model has it."""
        view = self.views[name]
        if name not in self.packed.left_out:
            return view
        [(names, layer)] = [item for item in self.model.linears().items() if name in item[0]]
        assert layer.packed is not None
        first = sum(layer.outs[: names.index(name)])
        return layer.packed.dequantise()[first : first + len(view)].to(view.dtype)


def product(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.dequantise().to(x.dtype), bias)


def make_model(spec: ModelSpec, rank: Shard | None) -> Decoder:
    return Decoder(spec, DTYPE, CPU) if rank is None else Decoder(rank.spec, DTYPE, CPU, rank.vocab)


def dense(source: ModelSource, rank: Shard | None = None) -> tuple[dict[str, torch.Tensor], str]:
    spec = read_spec(source)
    views = make_model(spec, rank).weights()
    return views, fingerprint(spec, load_model_weights(views, source, spec, "auto", 0, shard=rank))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_weights_and_fingerprint_are_those_of_a_dequantised_load(plain, tmp_path: Path, caplog, name, form) -> None:
    source = packed_checkpoint(plain[name], tmp_path, form).source
    with caplog.at_level(logging.INFO):
        loaded = Loaded(source)
    theirs, mark = dense(source)
    assert loaded.views.keys() == theirs.keys()
    for each, tensor in theirs.items():
        assert torch.equal(loaded.weight(each), tensor), each
    assert loaded.fingerprint == mark
    messages = [record.getMessage() for record in caplog.records if "packed" in record.name or "safe" in record.name]
    left = {each.split(".", 2)[2] for each in loaded.packed.left_out}
    messages = [line for line in messages if not line.startswith("weights in")]  # of the dequantised load
    if name == "deepseek-v3" and form != "fp8 blocks":
        assert {"q_a_proj.weight", "q_b_proj.weight", "kv_a_proj.weight", "o_proj.weight"} <= left
        assert {"shared.gate_proj.weight", "down_proj.weight"} <= left
        assert {"experts.0.gate_proj.weight", "experts.7.down_proj.weight"} <= left
        stacks = [layer.mlp.gate_up_proj for layer in loaded.model.layers if isinstance(layer.mlp, Experts)]
        assert stacks
        assert not any("weight" in vars(stack) for stack in stacks)  # of floats, that would take memory
        assert 0 < loaded.model.idle_bytes < loaded.packed.nbytes
        assert any("2 layers.*.k_b_proj" in line or "3 layers.*.k_b_proj" in line for line in messages)
        assert any("nothing multiplies them packed" in line for line in messages)
    elif form == "fp8 blocks":
        assert "q_proj.weight" not in left
        assert any("blocks of 48 columns" in line for line in messages)
    else:
        assert len(loaded.packed.left_out) == 7 * 2
        assert not any("dequantised" in line for line in messages)
        assert any(f"{7 * 2} in {'FP8' if form.startswith('fp8') else 'four bits'}" in line for line in messages)


def test_floats_take_no_memory_and_bits_are_counted(plain, tmp_path: Path) -> None:
    source = packed_checkpoint(plain["qwen3"], tmp_path, "gptq symmetric").source
    loaded = Loaded(source)
    assert {loaded.views[name].device.type for name in loaded.packed.left_out} == {"meta"}
    layers = [layer.packed for layer in loaded.model.linears().values()]
    assert all(isinstance(weight, Int4Weight) and weight.zeros is None for weight in layers)
    # Rows of 160, 128 and 192 columns are padded to 256, 128 and 256; a scale of two bytes a group.
    halves = [weight.outputs * -(-weight.inputs // 128) * 64 for weight in layers]
    scales = [weight.outputs * weight.inputs // GROUP * 2 for weight in layers]
    assert loaded.packed.nbytes == sum(halves) + sum(scales)
    assert loaded.packed.nbytes < 0.4 * sum(loaded.views[name].nbytes for name in loaded.packed.left_out)


def test_scales_that_rows_share_are_kept_once() -> None:
    values = torch.zeros(256, 200, dtype=torch.float8_e4m3fn)
    whole = FP8Matrix(values, torch.full((1, 1), 3.0), 256, 200)
    blocks = FP8Matrix(values, torch.rand(2, 2), 128, 128)
    [one, both, rows, mixed, cut] = [
        join(parts, eight=False)
        for parts in (
            [whole],
            [blocks, blocks],
            [FP8Matrix(values, torch.rand(256, 1), 1, 200)],
            [whole, blocks],
            [blocks.take(slice(0, 100)), blocks],
        )
    ]
    shapes = [(weight.rows, tuple(weight.scales.shape), weight.is_blocked) for weight in (one, both, rows, mixed, cut)]
    assert shapes == [
        (128, (1, 2), False),
        (128, (2, 4), True),
        (1, (1, 256), False),
        (128, (2, 4), True),
        (1, (2, 356), True),
    ]
    expected = torch.cat((blocks.take(slice(0, 100)).dequantise(), blocks.dequantise()))
    assert torch.equal(cut.dequantise(), expected)
    assert isinstance(mixed, FP8Weight)


def test_what_is_not_packed_of_one_product_keeps_the_rest_of_it_from_it(plain, tmp_path: Path, caplog) -> None:
    checkpoint = packed_checkpoint(plain["qwen3"], tmp_path, "fp8 rows", ("1.self_attn.k_proj.weight",))
    with caplog.at_level(logging.WARNING):
        loaded = Loaded(checkpoint.source)
    assert len(loaded.packed.left_out) == 14 - 3
    assert "1 layers.*.q_proj, 1 layers.*.v_proj: others that lie in one product" in caplog.text
    assert loaded.fingerprint == dense(checkpoint.source)[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["fp8 blocks of 128", "fp8 matrix", "fp8 rows", "awq", "gptq"])
def test_a_rank_has_its_part_and_the_whole_model_s_fingerprint(plain, tmp_path: Path, caplog, form, name) -> None:
    source = packed_checkpoint(plain[name], tmp_path, form).source
    spec, whole = read_spec(source), dense(source)[1]
    for number in range(2):
        rank = shard(spec, number, 2)
        with caplog.at_level(logging.WARNING):
            loaded = Loaded(source, rank)
        theirs, mark = dense(source, rank)
        assert mark == loaded.fingerprint == whole
        for each, tensor in theirs.items():
            assert torch.equal(loaded.weight(each), tensor), each
        left = {each.split(".", 2)[2] for each in loaded.packed.left_out}
        assert ("q_proj.weight" if name != "deepseek-v3" else "q_b_proj.weight") in left
        # Half of six heads' 96 columns are a group of 32 and a half.
        assert ("o_proj.weight" in left) == (name != "deepseek-v3" or form.startswith("fp8"))
        # 192 columns are two blocks, and the first rank has one and a half of them.
        is_cut = name != "deepseek-v3" and form == "fp8 blocks of 128"
        assert ("down_proj.weight" in left) == (not is_cut)
        assert ("2 layers.*.down_proj: a rank's columns are no blocks of 128" in caplog.text) == is_cut


def test_columns_that_share_scales_out_of_order_are_put_in_order_where_all_of_a_product_have_the_same(
    plain, tmp_path: Path, caplog
) -> None:
    checkpoint = packed_checkpoint(plain["qwen3"], tmp_path, "gptq v2 by activation")
    loaded = Loaded(checkpoint.source)
    orders = [layer.packed.order for layer in loaded.model.linears().values() if isinstance(layer.packed, Int4Weight)]
    assert not any(order is None or torch.equal(order, torch.arange(len(order))) for order in orders)
    for number, (name, change, reason) in enumerate(
        (
            ("0.self_attn.k_proj", lambda groups: groups.flip(0), "has scales for other groups of columns"),
            ("1.mlp.down_proj", lambda groups: groups.clamp(min=1), "groups of unlike numbers of columns"),
        )
    ):
        key = next(key for key in checkpoint.stored if key.endswith(f"{name}.g_idx"))
        checkpoint.stored[key] = change(checkpoint.stored[key])
        save_file(checkpoint.stored, checkpoint.source.path / "model.safetensors")
        assert len(Loaded(checkpoint.source).packed.left_out) == 14 - 3 - number
        assert reason in caplog.text
    rank = shard(read_spec(checkpoint.source), 0, 2)
    assert not any(name.endswith("o_proj.weight") for name in Loaded(checkpoint.source, rank).packed.left_out)
    assert "2 layers.*.o_proj: a rank's columns are no whole groups" in caplog.text


def test_activations_in_fp8_are_another_model(plain, tmp_path: Path) -> None:
    source = packed_checkpoint(plain["qwen3"], tmp_path, "fp8 rows").source
    assert Loaded(source, eight=True).fingerprint != Loaded(source).fingerprint


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        ("q_proj.weight_scale", None, "lacks .*q_proj.weight_scale'"),
        ("k_proj.weight", lambda t: t[:-8], r"has shape \[56, 160\], and"),
        ("down_proj.weight", lambda t: t[:, :-8], r"has shape \[160, 184\], the config means \[160, 192\]"),
    ],
)
def test_what_does_not_fit_is_named(plain, tmp_path: Path, ending: str, change: Any, message: str) -> None:
    checkpoint = packed_checkpoint(plain["qwen3"], tmp_path, "fp8 rows")
    name = next(name for name in checkpoint.stored if name.endswith(ending))
    tensor = checkpoint.stored.pop(name)
    if change is not None:
        changed = change(tensor.view(torch.uint8)).contiguous()
        checkpoint.stored[name] = changed.view(torch.float8_e4m3fn)
    save_file(checkpoint.stored, checkpoint.source.path / "model.safetensors")
    with pytest.raises(InvalidWeights, match=message):
        Loaded(checkpoint.source)


@pytest.mark.parametrize("packing", [Packing(PackingKind.FP8), Packing(PackingKind.FP8, (128, 128)), Packing("AWQ")])
def test_random_ones_are_about_as_large_as_random_floats(packing: Packing) -> None:
    source = DummyMatrices({"a": (200, 192), "b": (8, 40)}, packing, 3)
    assert source.why_not("a") is None
    assert (source.why_not("b") is None) == (packing.kind is PackingKind.FP8)
    weight = join([source.read("a", CPU)], eight=False).dequantise()
    assert abs(weight.std().item() / 0.02 - 1) < 0.1
    assert torch.equal(weight, source.read("a", CPU).dequantise())


def test_they_stay_packed_where_triton_is_and_otherwise_it_is_logged(
    plain, tmp_path: Path, monkeypatch, caplog
) -> None:
    awq = packed_checkpoint(plain["qwen3"], tmp_path, "awq").source
    cuda, usual = torch.device("cuda"), ModelSource("hf", plain["qwen3"])
    monkeypatch.setattr(open_packed, "triton_refusal", lambda device: None)
    assert choose_packed("auto", awq, cuda, is_alone=True) == "packed"
    assert choose_packed("packed", awq, CPU, is_alone=False) == "packed"
    for asked, source, device, is_alone in (
        ("auto", awq, CPU, True),
        ("auto", usual, cuda, True),
        ("none", awq, cuda, True),
    ):
        assert choose_packed(asked, source, device, is_alone=is_alone) is None
    for asked, source, is_alone, message in (
        ("packed", usual, True, "no weights in FP8, AWQ, GPTQ or INT4"),
        ("w8a8", awq, False, "a rank of --tp-size knows a part"),
        ("w8a8", awq, True, "in AWQ, not in FP8"),
    ):
        with pytest.raises(UnsupportedModel, match=f"--quantization {asked}: .*{message}"):
            choose_packed(asked, source, cuda, is_alone=is_alone)
    monkeypatch.setattr(open_packed, "triton_refusal", lambda device: "no Triton")
    assert choose_packed("auto", awq, cuda, is_alone=True) is None
    assert "can't stay packed: no Triton" in caplog.text
    with pytest.raises(UnsupportedModel, match="no Triton"):
        choose_packed("packed", awq, cuda, is_alone=True)


def test_ranks_with_their_parts_compute_what_one_does(plain, tmp_path: Path, monkeypatch) -> None:
    """A product of torch replaces Triton's, which is interpreted in one thread at a time."""
    pytest.importorskip("triton")
    monkeypatch.setattr(open_packed, "triton_refusal", lambda device: None)
    monkeypatch.setattr("pdserve.model_runner.ops.packed.product.packed_product", product)
    folder = packed_checkpoint(plain["qwen3"], tmp_path, "gptq").source.path
    common = {"device": "cpu", "dtype": "float32", "attention_backend": "torch", "page_size": 16}
    options = ServerOptions(model_path=str(folder), max_total_tokens=256, **common)  # type: ignore[arg-type]
    expected = run(load_model(options))
    ranks = make_ranks(2, replace(options, quantization="packed"))
    torch.testing.assert_close(together(ranks, run), expected, atol=1e-4, rtol=1e-4)
    assert {rank.quantization for rank in ranks} == {"packed"}
