"""Weights from GGUF, safetensors and nowhere, and the fingerprint that tells them apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pdserve.model_files.errors import InvalidWeights
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.rope_frequencies import inverse_frequencies
from pdserve.model_files.sharding import shard
from pdserve.model_files.spec import ModelSpec, RopeType
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.tensor_names import EMBEDDING, GGUF_LAYER
from pdserve.model_runner.loader.fingerprint import fingerprint
from pdserve.model_runner.loader.load import load_model_weights
from pdserve.model_runner.loader.tensor_samples import sample_tensor
from pdserve.model_runner.models.decoder import Decoder

SHAPE = {
    "vocab_size": 1500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32, "rope_theta": 500.0})
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
}
GLOBAL = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {ours[0]: theirs for theirs, ours in GGUF_LAYER.items() if len(ours) == 1}


def load(
    source: ModelSource, load_format: Literal["auto", "dummy"] = "auto", seed: int = 0
) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    spec = read_spec(source)
    weights = Decoder(spec, torch.float32, torch.device("cpu")).weights()
    load_model_weights(weights, source, spec, load_format, seed)
    return spec, weights


def save_hf(name: str, folder: Path) -> ModelSource:
    torch.manual_seed(3)
    model = MODELS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    return ModelSource("hf", folder)


def gguf_name(name: str) -> str:
    if name in GLOBAL:
        return GLOBAL[name]
    _, layer, part, kind = name.split(".")
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def to_llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half goes to 2 i, row i of its second half to 2 i + 1."""
    out, size = np.empty_like(rows), rows.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def save_gguf(name: str, spec: ModelSpec, weights: dict[str, torch.Tensor], path: Path) -> ModelSource:
    writer = gguf.GGUFWriter(path, name)
    attention, rope = spec.layers[0].attention, spec.ropes[0]
    # Long arrays come first, so that a wrong step over them derails everything behind.
    writer.add_token_list([f"token{i}" * (i % 5) for i in range(spec.vocab_size)])
    writer.add_token_types([1] * spec.vocab_size)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.layers[0].mlp.inner)
    writer.add_block_count(spec.num_layers)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.final_norm.eps)
    writer.add_rope_freq_base(rope.theta)
    for ours, tensor in weights.items():
        data, heads = tensor.numpy(), {"q_proj": attention.heads, "k_proj": attention.kv_heads}
        part = ours.split(".")[-2]
        if name == "llama" and part in heads:
            data = to_llama_cpp_order(data, heads[part])
        writer.add_tensor(gguf_name(ours), data)
    if name == "llama":
        plain = inverse_frequencies(replace(rope, type=RopeType.DEFAULT))
        writer.add_tensor("rope_freqs.weight", plain / inverse_frequencies(rope))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("gguf", path)


@pytest.mark.parametrize("name", list(MODELS))
def test_gguf_equals_safetensors(name: str, tmp_path: Path) -> None:
    hf_spec, hf_weights = load(save_hf(name, tmp_path))
    spec, weights = load(save_gguf(name, hf_spec, hf_weights, tmp_path / "m.gguf"))
    assert weights.keys() == hf_weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(tensor, hf_weights[key]), key
    np.testing.assert_array_equal(inverse_frequencies(spec.ropes[0]), inverse_frequencies(hf_spec.ropes[0]))
    eps = pytest.approx(hf_spec.final_norm.eps)
    assert spec.final_norm.eps == eps
    assert (spec.vocab_size, spec.tied_head) == (hf_spec.vocab_size, hf_spec.tied_head)
    for layer, hf_layer in zip(spec.layers, hf_spec.layers, strict=True):
        norm = layer.attention.qk_norm_spec
        assert replace(layer.attention, qk_norm_spec=None) == replace(hf_layer.attention, qk_norm_spec=None)
        assert norm is None or norm.eps == eps
        assert layer.mlp == hf_layer.mlp


def test_checkpoint_and_config_must_match(tmp_path: Path) -> None:
    source = save_hf("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.1.self_attn.q_proj.bias"
    for broken, says in (
        ({k: v for k, v in tensors.items() if k != key}, "lacks 1 tensors, 'layers.1.q_proj.bias'"),
        (tensors | {"model.layers.0.extra.weight": torch.ones(2)}, "holds 'model.layers.0.extra.weight'"),
        (tensors | {key: torch.ones(7)}, r"has shape \[7\], the config means \[64\]"),
    ):
        save_file(broken, file)
        with pytest.raises(InvalidWeights, match=says):
            load(source)
    file.write_bytes(b"nonsense")
    with pytest.raises(InvalidWeights, match="can't be read"):
        load(source)
    file.unlink()
    with pytest.raises(InvalidWeights, match="holds no model"):
        load(source)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF then nothing")
    with pytest.raises(InvalidWeights, match=r"broken\.gguf can't be read as GGUF: it has GGUF version 1701344288"):
        load(ModelSource("gguf", tmp_path / "broken.gguf"))


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    source = save_hf("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    spec, first = load(source, "dummy", seed=1)
    prints = [printed(spec, load(source, "dummy", seed)[1]) for seed in (1, 2)]
    assert prints[0] == printed(spec, first)
    assert prints[0] != prints[1]
    assert 0.015 < first["layers.0.up_proj.weight"].std() < 0.025
    assert torch.equal(first["norm.weight"], torch.ones(64))


def test_fingerprint_follows_every_tensor_the_type_and_the_config(tmp_path: Path) -> None:
    spec, weights = load(save_hf("qwen2", tmp_path))
    base = printed(spec, weights)
    assert len(base) == 16
    for key in weights:
        changed = weights | {key: weights[key] + 1e-3}
        assert printed(spec, changed) != base, key
    assert printed(spec, {key: tensor.bfloat16() for key, tensor in weights.items()}) != base
    assert printed(read_spec(save_hf("qwen3", tmp_path)), weights) != base


@pytest.mark.parametrize("token", [0, 701, 1499])
def test_fingerprint_follows_each_token_s_embedding(token: int, tmp_path: Path) -> None:
    spec, weights = load(save_hf("llama", tmp_path))
    table = weights[EMBEDDING].clone()
    table[token] += 1e-3
    assert printed(spec, weights | {EMBEDDING: table}) != printed(spec, weights)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_ranks_load_their_parts_and_know_the_whole(load_format: Literal["auto", "dummy"], tmp_path: Path) -> None:
    source = save_hf("qwen2", tmp_path)
    spec, whole = load(source, load_format)
    for rank in range(2):
        own = shard(spec, rank, 2)
        weights = Decoder(own.spec, torch.float32, torch.device("cpu"), own.vocab).weights()
        samples = load_model_weights(weights, source, spec, load_format, 0, shard=own)
        assert fingerprint(spec, samples) == printed(spec, whole)
        for name, tensor in weights.items():
            part = own.slice_of(name)
            expected = whole[name] if part is None else whole[name].narrow(part.axis, part.begin, part.size)
            assert torch.equal(tensor, expected), name
    assert any(own.slice_of(name) is not None for name in whole)


def printed(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> str:
    return fingerprint(spec, {name: sample_tensor(name, tensor, tensor.dtype) for name, tensor in weights.items()})


def test_a_tied_head_is_compared_exactly(tmp_path: Path) -> None:
    source, file = save_hf("qwen2", tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.bfloat16()}, file)
    with pytest.raises(InvalidWeights, match=r"'lm_head\.weight' with other values than the embeddings"):
        load(source)
    save_file(
        {**tensors, "model.embed_tokens.weight": table.bfloat16().float(), "lm_head.weight": table.bfloat16()}, file
    )
    load(source)
