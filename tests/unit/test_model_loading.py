"""Weights from GGUF, safetensors and nowhere, and the fingerprint that tells them apart."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pdserve.model_files.config import ModelConfig
from pdserve.model_files.config_reader import read_config
from pdserve.model_files.errors import InvalidWeights
from pdserve.model_files.model_path import ModelSource
from pdserve.model_runner.layers.rotary import inverse_frequencies
from pdserve.model_runner.loader.load import fingerprint, load_model_weights
from pdserve.model_runner.models.registry import make_model

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
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load(source: ModelSource, load_format: str = "auto", seed: int = 0) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = read_config(source)
    weights = make_model(config, torch.float32, torch.device("cpu")).weights()
    load_model_weights(weights, source, config, load_format, seed)
    return config, weights


def save_hf(name: str, folder: Path) -> ModelSource:
    torch.manual_seed(3)
    model = MODELS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    return ModelSource("hf", folder)


def gguf_name(name: str) -> str:
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return names.get(name, "output.weight")
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    part, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def to_llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half goes to 2 i, row i of its second half to 2 i + 1."""
    out, size = np.empty_like(rows), rows.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def save_gguf(name: str, config: ModelConfig, weights: dict[str, torch.Tensor], path: Path) -> ModelSource:
    writer = gguf.GGUFWriter(path, name)
    # Long arrays come first, so that a wrong step over them derails everything behind.
    writer.add_token_list([f"token{i}" * (i % 5) for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    for hf_name, tensor in weights.items():
        data, heads = tensor.numpy(), {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        part = hf_name.split(".")[-2]
        if name == "llama" and part in heads:
            data = to_llama_cpp_order(data, heads[part])
        writer.add_tensor(gguf_name(hf_name), data)
    if name == "llama":
        plain = 1.0 / config.rope.theta ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / inverse_frequencies(config.rope, config.head_dim)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource("gguf", path)


@pytest.mark.parametrize("name", list(MODELS))
def test_gguf_equals_safetensors(name: str, tmp_path: Path) -> None:
    hf_config, hf_weights = load(save_hf(name, tmp_path))
    config, weights = load(save_gguf(name, hf_config, hf_weights, tmp_path / "m.gguf"))
    assert weights.keys() == hf_weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(tensor, hf_weights[key]), key
    torch.testing.assert_close(
        inverse_frequencies(config.rope, config.head_dim), inverse_frequencies(hf_config.rope, hf_config.head_dim)
    )
    same = (
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
        "qkv_bias",
        "qk_norm",
    )
    assert [getattr(config, field) for field in same] == [getattr(hf_config, field) for field in same]
    assert config.rms_norm_eps == pytest.approx(hf_config.rms_norm_eps)


def test_checkpoint_and_config_must_match(tmp_path: Path) -> None:
    source = save_hf("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.1.self_attn.q_proj.bias"
    for broken, says in (
        ({k: v for k, v in tensors.items() if k != key}, f"lacks 1 tensors, '{key}'"),
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
    with pytest.raises(InvalidWeights, match="not a readable GGUF file"):
        load(ModelSource("gguf", tmp_path / "broken.gguf"))


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    source = save_hf("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config, first = load(source, "dummy", seed=1)
    prints = [fingerprint(config, load(source, "dummy", seed)[1]) for seed in (1, 2)]
    assert prints[0] == fingerprint(config, first)
    assert prints[0] != prints[1]
    assert 0.015 < first["model.layers.0.mlp.up_proj.weight"].std() < 0.025
    assert torch.equal(first["model.norm.weight"], torch.ones(64))


def test_fingerprint_follows_every_tensor_the_type_and_the_config(tmp_path: Path) -> None:
    config, weights = load(save_hf("qwen2", tmp_path))
    base = fingerprint(config, weights)
    assert len(base) == 16
    for key in weights:
        changed = weights | {key: weights[key] + 1e-3}
        assert fingerprint(config, changed) != base, key
    assert fingerprint(config, {key: tensor.bfloat16() for key, tensor in weights.items()}) != base
    assert fingerprint(read_config(save_hf("qwen3", tmp_path)), weights) != base
