"""Weights of experts, in each spelling that files have of them: the same tensors, names and fingerprints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from support.families import make_reference
from support.gguf_export import write_gguf
from support.model_harness import PAGE, PAGES, Harness, Rows, draw
from support.passes import forward
from support.rank_threads import make_ranks, together
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pdserve.model_files.checkpoint import tensor_sizes
from pdserve.model_files.errors import InvalidWeights, UnsupportedModel
from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.sharding import shard
from pdserve.model_files.spec import ExpertsSpec, ModelSpec
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.tensor_names import GGUF_EXPERTS, HF_EXPERTS, Part, find_parts
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.loader.arrays import copy_converted
from pdserve.model_runner.loader.fill import Origin, fill_places
from pdserve.model_runner.loader.fingerprint import fingerprint
from pdserve.model_runner.loader.gguf_blocks import GGUFBlocks, linear_layers
from pdserve.model_runner.loader.host_model import HostModel, weight_shapes
from pdserve.model_runner.loader.host_weights import ArrayPlace
from pdserve.model_runner.loader.load import load_model_weights
from pdserve.model_runner.loader.mxfp4 import dequantise
from pdserve.model_runner.loader.quantized_blocks import FORMATS, RoundedBlocks, has_whole_blocks
from pdserve.model_runner.models.decoder import Decoder
from pdserve.server.options import ServerOptions

BLOCKY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Rows of whole blocks of 32."""
LAYER = "model.layers.1.mlp.experts"


def load(source: ModelSource) -> tuple[ModelSpec, dict[str, Tensor], str]:
    """Return the model's spec, its weights by our names, and its fingerprint."""
    spec = read_spec(source)
    weights = Decoder(spec, torch.float32, torch.device("cpu")).weights()
    samples = load_model_weights(weights, source, spec, "auto", 0)
    return spec, weights, fingerprint(spec, samples)


def save(name: str, folder: Path, *, fused: bool = False, **changes: Any) -> ModelSource:
    model = make_reference(name, **changes)
    model.save_pretrained(folder, save_original_format=not fused)
    return ModelSource("hf", folder)


def rewrite(source: ModelSource, change: Callable[[dict[str, Tensor]], object]) -> ModelSource:
    file = source.path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return source


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", ["qwen3-moe-sparse", "qwen2-moe", "mixtral"])
def test_experts_one_by_one_and_all_in_one_tensor(name: str, tmp_path: Path) -> None:
    _, apart, first = load(save(name, tmp_path / "apart"))
    source = save(name, tmp_path / "fused", fused=True)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in load_file(source.path / "model.safetensors"))
    _, fused, second = load(source)
    same(apart, fused)
    assert first == second
    assert "layers.1.experts.4.up_proj.weight" in apart


def with_mxfp4(tensors: dict[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    """Put random blocks in the place of the experts' weights. Returns them as transformers dequantises them."""
    generator = torch.Generator().manual_seed(seed)
    floats = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        size = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, size, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return floats


def quantised(source: ModelSource) -> ModelSource:
    """Declare the quantisation in the config, as published checkpoints do."""
    file = source.path / "config.json"
    raw = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(raw))
    return source


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    source = save("gpt-oss", tmp_path / "floats", **BLOCKY)
    floats: dict[str, Tensor] = {}
    blocks = save("gpt-oss", tmp_path / "blocks", **BLOCKY)
    rewrite(quantised(blocks), lambda tensors: floats.update(with_mxfp4(tensors)))
    rewrite(source, lambda tensors: tensors.update(floats))
    _, expected, first = load(source)
    _, found, second = load(blocks)
    same(found, expected)
    assert first == second
    assert len(found["layers.2.experts.4.gate_proj.weight"].unique()) > 30
    # What a byte holds is two weights.
    sizes = [sum(size.values for size in tensor_sizes(one)) for one in (source, blocks)]
    assert sizes[0] == sizes[1]


def test_mxfp4_of_every_byte_and_every_exponent() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).expand(16, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8)[:-1]
    scales = torch.cat((scales, scales[:1])).view(16, 16)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(torch.from_numpy(dequantise(blocks.numpy(), scales.numpy())), expected)


def test_mxfp4_whose_scales_lie_in_another_file(tmp_path: Path) -> None:
    source = quantised(save("gpt-oss", tmp_path, **BLOCKY))
    rewrite(source, with_mxfp4)
    _, expected, _ = load(source)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: "a.safetensors" if name.endswith("_scales") else "b.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    same(load(source)[1], expected)


@pytest.mark.parametrize("change", [lambda t: t.float(), lambda t: t[..., :8], lambda t: t[0, 0]])
def test_mxfp4_of_another_form_is_refused(change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    source = quantised(save("gpt-oss", tmp_path, **BLOCKY))
    name = f"{LAYER}.down_proj"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}_blocks"] = change(tensors[f"{name}_blocks"]).contiguous()
        if tensors[f"{name}_blocks"].dim() < 3:
            tensors[f"{name}_scales"] = tensors[f"{name}_scales"][0, 0].contiguous()

    rewrite(source, with_mxfp4)
    rewrite(source, spoil)
    with pytest.raises(InvalidWeights, match="down_proj_blocks"):
        load(source)


def test_another_quantisation_is_refused() -> None:
    raw = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "bitsandbytes"}}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16}
    more = {"vocab_size": 9, "max_position_embeddings": 64, "num_local_experts": 4}
    with pytest.raises(UnsupportedModel, match="quantised safetensors"):
        spec_from_hf(raw | sizes | more)
    with pytest.raises(UnsupportedModel, match="quantised safetensors"):
        spec_from_hf(raw | sizes | more | {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}})


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gpt-oss", lambda t: t.update({f"{LAYER}.down_proj": t[f"{LAYER}.down_proj"][:4]}), "is of 4 experts"),
        ("gpt-oss", lambda t: t.update({f"{LAYER}.gate_up_proj": t[f"{LAYER}.gate_up_proj"][..., 2:]}), "rows, the"),
        ("gpt-oss", lambda t: t.update({f"{LAYER}.down_proj": t[f"{LAYER}.down_proj"][:, 2:]}), "has shape"),
        ("qwen3-moe", lambda t: t.pop(f"{LAYER}.3.up_proj.weight"), "'layers.1.experts.3.up_proj.weight'"),
        ("qwen3-moe", lambda t: t.update({f"{LAYER}.5.up_proj.weight": torch.ones(36, 48)}), "does not account for"),
        ("qwen3-moe", lambda t: t.update({f"{LAYER}.down_proj_blocks": torch.ones(3)}), "lacks '.*down_proj_scales'"),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: Callable[[dict], object], says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidWeights, match=says):
        load(rewrite(save(name, tmp_path), change))


def test_names_of_what_only_other_families_have() -> None:
    spec = spec_from_hf(make_reference("mixtral").config.to_dict())
    bias = (Part("layers.2.router.choice_bias"),)
    hf, in_gguf = replace(spec, tensors=HF_EXPERTS), replace(spec, tensors=GGUF_EXPERTS)
    assert find_parts(hf, "model.layers.2.mlp.gate.e_score_correction_bias") == bias
    assert find_parts(in_gguf, "blk.2.exp_probs_b.bias") == bias
    assert [part.expert for part in find_parts(in_gguf, "blk.2.ffn_gate_up_exps.weight")] == sorted([*range(5)] * 2)
    assert find_parts(hf, "model.layers.3.mlp.gate.weight") == ()
    dense = spec_from_hf(make_reference("llama").config.to_dict())
    assert find_parts(replace(dense, tensors=HF_EXPERTS), "model.layers.0.mlp.experts.down_proj") == ()


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"])
def test_gguf_equals_safetensors(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path)
    path = write_gguf(make_reference(name), tmp_path / "m.gguf")
    hf_spec, hf_weights, _ = load(source)
    spec, weights, _ = load(ModelSource("gguf", path))
    same(weights, hf_weights)
    for ours, theirs in zip(spec.layers, hf_spec.layers, strict=True):
        assert ours.mlp == theirs.mlp
        assert (ours.attention.sinks, ours.attention.window) == (theirs.attention.sinks, theirs.attention.window)


def test_gguf_of_another_converter(tmp_path: Path) -> None:
    """Gate and up of all experts in one tensor, and the gate of the shared one as a vector."""
    path = write_gguf(make_reference("qwen2-moe"), tmp_path / "m.gguf")
    _, expected, _ = load(ModelSource("gguf", path))

    def change(tensors: dict[str, np.ndarray]) -> None:
        for i in range(3):
            parts = [tensors.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)
            tensors[f"blk.{i}.ffn_gate_inp_shexp.weight"] = tensors[f"blk.{i}.ffn_gate_inp_shexp.weight"].ravel()

    same(load(ModelSource("gguf", changed(path, change)))[1], expected)


def changed(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    """Copy a GGUF of plain numbers with ``change`` applied to its tensors."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(tensors)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path.with_name("changed.gguf"), arch)
    for name, field in reader.fields.items():
        if name.startswith(f"{arch}."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("changed.gguf")


def blocky(kind: Kind, folder: Path, name: str = "qwen2-moe") -> tuple[Path, ModelSpec]:
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128, "head_dim": 16}
    path = write_gguf(make_reference(name, **BLOCKY, **sizes), folder / "m.gguf", kind)
    return path, read_spec(ModelSource("gguf", path))


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_each_expert(ranks: int, tmp_path: Path) -> None:
    """A rank's are its rows of gate and up, and its columns of down."""
    path, spec = blocky(Kind.Q8_0, tmp_path)
    _, exact, _ = load(ModelSource("gguf", path))
    for rank in range(ranks):
        own = shard(spec, rank, ranks)
        blocks = GGUFBlocks(path, spec, own)
        for i in range(3):
            for network in (*(f"experts.{e}" for e in range(5)), "shared"):
                gate, up, down = (f"layers.{i}.{network}.{part}_proj.weight" for part in ("gate", "up", "down"))
                for names in ((gate, up), (down,)):
                    found = blocks.find(names, np.empty(0))
                    assert found is not None
                    for name, part in zip(names, found, strict=True):
                        assert part.format == FORMATS[Kind.Q8_0]
                        values = torch.from_numpy(gguf.dequantize(part.blocks, Kind.Q8_0))
                        cut = own.slice_of(name)
                        whole = exact[name]
                        assert torch.equal(
                            values, whole if cut is None else whole.narrow(cut.axis, cut.begin, cut.size)
                        )
        assert {"layers.0.experts.3.up_proj.weight", "layers.2.shared.down_proj.weight"} <= blocks.left_out
        assert not any("router" in name or "shared_gate" in name for name in blocks.left_out)


def test_blocks_are_not_loaded_as_floats_and_tell_files_apart(tmp_path: Path) -> None:
    path, spec = blocky(Kind.Q8_0, tmp_path)
    blocks = GGUFBlocks(path, spec)
    weights = HostModel(spec, "float32").weights()
    for view in weights.values():
        view[...] = np.nan
    places = {name: ArrayPlace(view, copy_converted) for name, view in weights.items()}
    samples = fill_places(places, weight_shapes(spec), Origin(ModelSource("gguf", path), spec), blocks.left_out)
    assert {name for name, view in weights.items() if np.isnan(view).all()} == blocks.left_out
    plain = fingerprint(spec, samples, "gguf", blocks)

    again = GGUFBlocks(path, spec)
    one, other = (again._matrices[f"layers.1.experts.{e}.down_proj.weight"] for e in (0, 4))
    again._matrices |= {"layers.1.experts.0.down_proj.weight": other, "layers.1.experts.4.down_proj.weight": one}
    assert fingerprint(spec, samples, "gguf", again) != plain
    wrong = replace(spec, layers=tuple(replace(layer, mlp=_with_inner(layer.mlp, 32)) for layer in spec.layers))
    with pytest.raises(InvalidWeights, match="the config means"):
        blocks.check(weight_shapes(wrong))


def _with_inner(mlp: Any, inner: int) -> ExpertsSpec:
    return replace(mlp, inner=inner)


def test_kinds_without_kernels_are_dequantised(tmp_path: Path) -> None:
    path = write_gguf(make_reference("gpt-oss", **BLOCKY, head_dim=16), tmp_path / "m.gguf", Kind.MXFP4)
    spec, weights, _ = load(ModelSource("gguf", path))
    assert not GGUFBlocks(path, spec).left_out
    exact = make_reference("gpt-oss", **BLOCKY, head_dim=16).state_dict()[f"{LAYER}.down_proj"][2].T
    error = (weights["layers.1.experts.2.down_proj.weight"] - exact).norm() / exact.norm()
    assert 0.01 < error < 0.2


def test_rounded_blocks_are_of_each_expert_s_own_matrix() -> None:
    torch.manual_seed(2)
    weight = torch.randn(2, 6, 64)
    [found] = RoundedBlocks(8).find(["layers.0.experts.1.down_proj.weight"], weight[1].numpy()) or []
    torch.testing.assert_close(torch.from_numpy(gguf.dequantize(found.blocks, Kind.Q8_0)), weight[1], atol=0.02, rtol=0)
    spec = spec_from_hf(make_reference("qwen2-moe", **BLOCKY, moe_intermediate_size=64, head_dim=16).config.to_dict())
    assert not has_whole_blocks(spec)
    whole = make_reference(
        "qwen2-moe", **BLOCKY, moe_intermediate_size=64, head_dim=16, shared_expert_intermediate_size=32
    )
    assert has_whole_blocks(spec_from_hf(whole.config.to_dict()))


@pytest.fixture
def has_kernels() -> None:
    try:
        load_library()
    except BuildError as error:
        pytest.skip(str(error))


def noise(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


EVERY_EXPERT = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128, "num_experts_per_tok": 5}
"""Settings that choose every expert. A choice of some of them would differ after rounding."""


@pytest.mark.usefixtures("has_kernels")
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_the_kernels_multiply_with_each_expert_s_own_blocks(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(make_reference("qwen2-moe", **BLOCKY, **EVERY_EXPERT, head_dim=16), tmp_path / "m.gguf", kind)
    tokens = draw(60, 6)
    exact = Harness(path, attention_backend="torch").forward((0, tokens))
    blocks = Harness(path, dtype="float32", quantization="gguf")
    assert (blocks.runner.engine.attention_backend, blocks.runner.quantization) == ("cpu", "gguf")
    ours = torch.cat((blocks.forward((0, tokens[:50])), blocks.forward((0, tokens[50:]))))
    # Activations are rounded to 8 bits; a wrong expert costs everything.
    assert 1e-4 < noise(ours, exact) < 0.1
    options = {"device": "cpu", "dtype": "float32", "page_size": PAGE, "max_total_tokens": PAGES * PAGE}
    ranks = make_ranks(2, ServerOptions(model_path=str(path), quantization="gguf", **options))
    halves = together(ranks, lambda runner: Rows(partial(forward, runner.engine)).forward((0, tokens)))
    assert 1e-4 < noise(halves, exact) < 0.1


@pytest.mark.usefixtures("has_kernels")
def test_experts_are_rounded_one_by_one(tmp_path: Path) -> None:
    source = save("qwen2-moe", tmp_path, **BLOCKY, **EVERY_EXPERT, head_dim=16)
    tokens = draw(60, 6)
    exact = Harness(source.path, attention_backend="torch").forward((0, tokens))
    ours = Harness(source.path, quantization="int8").forward((0, tokens))
    assert 1e-4 < noise(ours, exact) < 0.1


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
def test_dummy_weights_need_only_a_config(name: str, tmp_path: Path) -> None:
    make_reference(name).config.save_pretrained(tmp_path)
    harness = Harness(tmp_path, load_format="dummy", attention_backend="torch")
    assert harness.forward((0, draw(30, 1))).isfinite().all()


def test_linear_layers_of_dense_and_sparse_layers() -> None:
    spec = spec_from_hf(make_reference("qwen3-moe-sparse").config.to_dict())
    groups = list(linear_layers(spec))
    assert ("layers.0.gate_proj.weight", "layers.0.up_proj.weight") in groups
    assert ("layers.1.experts.4.down_proj.weight",) in groups
    assert ("layers.3.down_proj.weight",) in groups
    assert len(groups) == 5 * 2 + 4 * 2 + 5 * 2 + 1


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
def test_ranks_load_their_parts_and_know_the_whole(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path)
    spec, whole, printed = load(source)
    added = [name for name in whole if name.endswith(("o_proj.bias", "down_proj.bias"))]
    sums = {name: torch.zeros_like(whole[name]) for name in added}
    for rank in range(2):
        own = shard(spec, rank, 2)
        weights = Decoder(own.spec, torch.float32, torch.device("cpu"), own.vocab).weights()
        samples = load_model_weights(weights, source, spec, "auto", 0, shard=own)
        assert fingerprint(spec, samples) == printed
        for ours, tensor in weights.items():
            part = own.slice_of(ours)
            if ours in sums:
                sums[ours] += tensor
            else:
                cut = whole[ours] if part is None else whole[ours].narrow(part.axis, part.begin, part.size)
                assert torch.equal(tensor, cut), ours
        assert weights["layers.0.experts.1.gate_proj.weight"].shape[0] * 2 == spec.layers[0].mlp.inner
    same(sums, {name: whole[name] for name in sums})
