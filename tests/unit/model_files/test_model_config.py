"""Reading config.json: older and newer spellings, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.families import make_config

from pdserve.model_files.context_length import choose_context_length, with_context, without_idle_windows
from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.spec import ModelSpec, Pairing, QKNorm, RopeSpec, RopeType
from pdserve.model_files.spec_reader import read_spec

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


def read(folder: Path, **fields: object) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(BASE | fields))
    return read_spec(ModelSource("hf", folder))


def test_older_and_newer_rope_spellings_agree(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    older = read(tmp_path, rope_theta=500000.0, rope_scaling={"type": "llama3", **scaling})
    newer = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling})
    assert older == newer
    assert older.ropes == (
        RopeSpec(rotary_dim=16, theta=500000.0, type=RopeType.LLAMA3, factor=8.0, original_context=1024),
    )


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(tmp_path, rope_scaling=scaling).context_length == 16384


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 1024}, (1024, 1024)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 1024, "max_window_layers": 1}, (None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 1024, "max_window_layers": 1, "use_sliding_window": True},
            (None, 1024),
        ),
    ],
)
def test_a_sliding_window_is_the_layers_own(tmp_path: Path, fields: dict[str, object], windows: object) -> None:
    spec = read(tmp_path, **fields)
    assert tuple(layer.attention.window for layer in spec.layers) == windows
    assert spec.context_length == 4096


def test_a_window_that_no_sequence_outgrows_is_none(tmp_path: Path) -> None:
    spec = read(tmp_path, model_type="mistral", sliding_window=1024)
    assert without_idle_windows(with_context(spec, 1025)).layers == spec.layers
    assert without_idle_windows(with_context(spec, 1024)).layers[0].attention.window is None


def test_longrope_is_chosen_by_the_served_context(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    spec = read(tmp_path, rope_scaling={**scaling, "original_max_position_embeddings": 1024})
    short, long = with_context(spec, 1024).ropes[0], with_context(spec, 1025).ropes[0]
    assert (short.freq_factors, long.freq_factors) == ((1.0,) * 8, (4.0,) * 8)
    assert not short.long_factors
    assert short.attention_factor == long.attention_factor == pytest.approx((1 + 2 / 10) ** 0.5)


def test_families_set_biases_and_norms(tmp_path: Path) -> None:
    llama = read(tmp_path, attention_bias=True).layers[0].attention
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm) == (True, True, None)
    qwen2 = read(tmp_path, model_type="qwen2").layers[0].attention
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, None)
    qwen3 = read(tmp_path, model_type="qwen3").layers[0].attention
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, QKNorm.HEAD)


GEMMA3 = {"model_type": "gemma3_text"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 500.0}
LONGROPE = YARN | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (GEMMA3 | {"hidden_activation": None}, "hidden_activation None is not supported"),
        ({"hidden_act": None}, "hidden_act None is not supported"),
        ({"hidden_act": ""}, "hidden_act '' is not supported"),
        ({"rms_norm_eps": None}, "rms_norm_eps None can't be used"),
        ({"rms_norm_eps": True}, "rms_norm_eps True can't be used: it must be a number"),
        ({"attention_bias": None}, "attention_bias None can't be used: it must be true or false"),
        ({"mlp_bias": None}, "mlp_bias None can't be used"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings None can't be used"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' can't be used"),
        ({"model_type": "glm4", "attention_bias": None}, "attention_bias None can't be used"),
        ({"model_type": "qwen2", "use_sliding_window": None}, "use_sliding_window None can't be used"),
        ({"model_type": "smollm3", "use_sliding_window": None}, "use_sliding_window None can't be used"),
        ({"model_type": "qwen2_moe", "num_experts": 8, "qkv_bias": None}, "qkv_bias None can't be used"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": None}, "norm_topk_prob None can't be used"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps -1\.0 is not supported"),
        (GEMMA3 | {"query_pre_attn_scalar": None}, "query_pre_attn_scalar None can't be used"),
        ({"model_type": "granite", "attention_multiplier": None}, "attention_multiplier None can't be used"),
        ({"rope_theta": 0}, r"rope_theta 0\.0 is not supported: it must be a finite number above 0"),
        ({"rope_theta": -5}, r"rope_theta -5\.0 is not supported"),
        ({"rope_theta": "500"}, "rope_theta '500' can't be used: it must be a number"),
        ({"rope_parameters": YARN | {"rope_theta": 1.0}}, r"rope_theta 1\.0 is not supported with yarn"),
        ({"rope_parameters": YARN | {"factor": 0}}, r"factor 0\.0 is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, r"factor 0\.0 is not supported"),
        ({"rope_parameters": YARN | {"mscale": "1.0", "mscale_all_dim": 1.0}}, r"mscale '1\.0' can't be used"),
        ({"rope_parameters": YARN | {"beta_fast": -1}}, r"beta_fast -1\.0 is not supported"),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings 0 is not supported",
        ),
        ({"rope_parameters": LONGROPE | {"short_factor": "x"}}, "short_factor 'x' can't be used: it must be a list"),
        ({"rope_parameters": LONGROPE | {"long_factor": [0.0] * 8}}, r"long_factor 0\.0 is not supported"),
        (
            {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 1}},
            "original_max_position_embeddings 1 is not supported",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0 is not supported"),
        ({"model_type": "phi3", "sliding_window": 0}, "sliding_window 0 is not supported"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern 0 is not supported"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 0}, "decoder_sparse_step 0 is not"),
        ({"model_type": "qwen3_moe", "num_experts": 9, "mlp_only_layers": "x"}, "mlp_only_layers 'x' can't be used"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval 0 is not supported"),
        ({"model_type": "smollm3", "no_rope_layers": 5}, "no_rope_layers 5 can't be used: it must be a list"),
        ({"model_type": "gpt_oss", "num_local_experts": 4, "quantization_config": "x"}, "quantization_config 'x'"),
        ({"text_config": "x"}, "text_config 'x' is not supported"),
        ({"text_config": [1]}, r"text_config \[1\] is not supported"),
        ({"model_type": "gemma3", "text_config": "x"}, "text_config 'x' can't be used: it must be an object"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_key(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message}"):
        read(tmp_path, **fields)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3"])
def test_a_null_of_a_bias_that_the_family_does_not_know_changes_nothing(tmp_path: Path, family: str) -> None:
    experts = {"mixtral": {"num_local_experts": 4}, "qwen2_moe": {"num_experts": 4}}
    fields = {"model_type": family, **experts.get(family, {})}
    nulls = {"mlp_bias": None} if family == "qwen3" else {"mlp_bias": None, "attention_bias": None}
    assert read(tmp_path, **fields, **nulls) == read(tmp_path, **fields)


def test_nulls_that_the_classes_of_deepseek_and_gemma_allow_are_false(tmp_path: Path) -> None:
    deepseek = make_config("deepseek-v3").to_dict()
    spec = read(tmp_path, **deepseek | {"norm_topk_prob": None, "rope_interleave": None})
    assert not spec.layers[-1].mlp.normalised
    assert spec.ropes[0].pairing is Pairing.HALVES
    gemma = {"model_type": "gemma3", "text_config": BASE | GEMMA3}
    assert read(tmp_path, **gemma).tied_head
    assert not read(tmp_path, **gemma, tie_word_embeddings=None).tied_head


def test_a_window_that_is_not_in_use_may_be_of_no_size(tmp_path: Path) -> None:
    for name in ({"model_type": "qwen2"}, {"model_type": "qwen3_moe", "num_experts": 8}):
        assert read(tmp_path, **name, sliding_window=0).layers[0].attention.window is None


def test_context_length_option(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert choose_context_length(spec, None) == 4096
    assert choose_context_length(spec, 100) == 100
    with pytest.raises(UnsupportedModel, match="--context-length 5000 is not within"):
        choose_context_length(spec, 5000)
