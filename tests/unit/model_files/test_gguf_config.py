"""What the metadata of a GGUF say of a model: read as llama.cpp does, or refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.model_files.errors import UnsupportedModel, reading
from pdserve.model_files.families.gguf_config import GGUFConfig
from pdserve.model_files.families.registry import spec_from_gguf
from pdserve.model_files.spec import ModelSpec

FILE = Path("m.gguf")
EPSILON, PATTERN = "attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern"
SHAPE = {
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "block_count": 12,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    EPSILON: 1e-5,
}
WINDOW = {"attention.sliding_window": 16}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
LATENT = {
    "attention.head_count_kv": 4,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    **EXPERTS,
    "expert_shared_count": 1,
}


def read(family: str, **fields: Any) -> ModelSpec:
    """Read metadata of ``family`` with ``fields``; None stands for a key that is missing."""
    keys = {f"{family}.{key}": value for key, value in (SHAPE | fields).items() if value is not None}
    table = SimpleNamespace(shape=(32, 280))
    file = SimpleNamespace(
        metadata={"general.architecture": family, **keys},
        tensors={"token_embd.weight": table},
        vocabulary_size=280,
        path=FILE,
    )
    with reading(FILE, "has no usable metadata"):
        return spec_from_gguf(GGUFConfig(file))


@pytest.mark.parametrize(
    ("family", "pattern", "slides"),
    [
        ("gemma2", None, [True, False] * 6),
        ("gemma2", 3, [True, True, False] * 4),
        ("gemma3", None, [*[True] * 5, False] * 2),
        ("gemma3", 3, [True, True, False] * 4),
        ("gemma3", 1, [False] * 12),
        ("gemma3", 0, [True] * 12),
        ("gemma3", [False, True] * 6, [False, True] * 6),
        ("gpt-oss", None, [True, False] * 6),
        ("gpt-oss", 3, [True, True, False] * 4),
    ],
)
def test_the_pattern_says_which_layers_have_a_window(family: str, pattern: object, slides: list[bool]) -> None:
    attentions = [
        layer.attention
        for layer in read(family, **(EXPERTS if family == "gpt-oss" else {}), **WINDOW, **{PATTERN: pattern}).layers
    ]
    assert [attention.window for attention in attentions] == [16 if has else None for has in slides]
    if family == "gemma3":
        assert [attention.rope for attention in attentions] == [int(has) for has in slides]


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma3", WINDOW | {PATTERN: [True]}, f"{PATTERN} of 1 layers"),
        ("gemma3", WINDOW | {PATTERN: -1}, f"{PATTERN} -1"),
        ("llama", WINDOW | {PATTERN: 2}, f"llama.{PATTERN} 2"),
        ("deepseek2", LATENT | {"attention.temperature_scale": 0.1}, "deepseek2.attention.temperature_scale 0.1"),
        ("deepseek2", LATENT | {"attention.temperature_length": 64}, "deepseek2.attention.temperature_length 64"),
        ("llama", {"attention.output_scale": 2.0}, "llama.attention.output_scale 2.0"),
        ("llama", {"attention.value_scale": 2.0}, "llama.attention.value_scale 2.0"),
        ("llama", {"router_logit_softcapping": 30.0}, "llama.router_logit_softcapping 30.0"),
        ("llama", {EPSILON: None}, f"it lacks '{EPSILON}'"),
        ("deepseek2", LATENT | {EPSILON: None, "attention.layer_norm_epsilon": 0.1}, f"it lacks '{EPSILON}'"),
        ("llama", {EPSILON: -1.0}, f"{EPSILON} -1.0"),
        ("gpt-oss", EXPERTS | WINDOW | {"rope.freq_base_swa": 500.0}, "gpt-oss.rope.freq_base_swa 500.0"),
        ("llama", {"rope.freq_base": -5.0}, "rope.freq_base -5.0"),
        ("llama", {"rope.scaling.factor": -2.0}, "rope.scaling.factor -2.0"),
        ("gemma3", WINDOW | {"rope.freq_base_swa": 0.0}, "rope.freq_base_swa 0.0"),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(family: str, fields: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read(family, **fields)
    assert str(refused.value).startswith(str(FILE))
    assert message in str(refused.value)


def test_an_original_context_of_none_is_the_context() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 0}
    assert read("llama", **yarn).ropes[0].original_context == 256


def test_layers_with_a_window_may_state_the_rope_of_the_others() -> None:
    both = {"rope.freq_base": 500.0, "rope.freq_base_swa": 500.0}
    assert read("gpt-oss", **EXPERTS, **WINDOW, **both).ropes[0].theta == 500.0


def test_a_deepseek_without_a_temperature_is_read() -> None:
    assert read("deepseek2", **LATENT, **{"attention.temperature_scale": 0.0}).num_layers == 12
