"""Reading config.json: older and newer spellings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.model_files.config import ModelConfig, RopeConfig, RopeType, choose_context_length
from pdserve.model_files.config_hf import read_hf_config
from pdserve.model_files.errors import UnsupportedModel

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def read(folder: Path, **fields: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(BASE | fields))
    return read_hf_config(folder)


def test_older_and_newer_rope_spellings_agree(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    older = read(tmp_path, rope_theta=500000.0, rope_scaling={"type": "llama3", **scaling})
    newer = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling})
    assert older == newer
    assert older.rope == RopeConfig(theta=500000.0, type=RopeType.LLAMA3, factor=8.0, original_context=1024)


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(tmp_path, rope_scaling=scaling).context_length == 16384


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"model_type": "mistral", "sliding_window": 1024}, 1024),
        ({"model_type": "mistral", "sliding_window": None}, 4096),
        ({"model_type": "qwen2", "sliding_window": 1024}, 4096),
        ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": True}, 1024),
    ],
)
def test_a_sliding_window_limits_the_context(tmp_path: Path, fields: dict[str, object], context: int) -> None:
    assert read(tmp_path, **fields).context_length == context


def test_families_set_biases_and_norms(tmp_path: Path) -> None:
    llama = read(tmp_path, attention_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm) == (True, True, False)
    qwen2 = read(tmp_path, model_type="qwen2")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, model_type="qwen3")
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised safetensors"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"num_key_value_heads": 3}, "4 heads can't share 3"),
        ({"vocab_size": None}, "no usable model config"),
    ],
)
def test_refusals_name_the_reason(tmp_path: Path, fields: dict[str, object], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        read(tmp_path, **fields)


def test_context_length_option(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert choose_context_length(config, None) == 4096
    assert choose_context_length(config, 100) == 100
    with pytest.raises(UnsupportedModel, match="--context-length 5000 is not within"):
        choose_context_length(config, 5000)
