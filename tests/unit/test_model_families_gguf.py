"""Every family that llama.cpp writes, from GGUF files by its conventions, against transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from support.families import LINEAR, make_reference
from support.gguf_export import write_gguf
from support.model_harness import Harness, close, draw, reference_logits

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.spec_reader import read_spec

LENGTH = 150
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama-biased", {"hidden_act": "silu"}),
    "llama3": ("llama-llama3", {}),
    "linear": ("llama-linear", {}),
    "yarn": ("llama-yarn", {}),
    "mistral": ("mistral", {}),
    "smollm3": ("smollm3", {}),
    "smollm3-biased": ("smollm3-window", {"no_rope_layers": None, "use_sliding_window": False}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    # The scale of scores follows from head_dim, but for the largest, which is known by its layers.
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma2-largest": ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 16, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ),
    "gemma3-more": (
        "gemma3",
        {
            "num_hidden_layers": 13,
            "num_key_value_heads": 3,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {"full_attention": LOCAL | {"rope_theta": 700.0}, "sliding_attention": LOCAL},
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-long": ("phi3-long", {}),
    "olmo2": ("olmo2", {}),
    "olmo2-yarn": ("olmo2-biased", {"attention_bias": False}),
    "granite": ("granite", {}),
    "granite-biased": ("granite-biased", {}),
    "glm4": ("glm4", {}),
    "glm4-odd": ("glm4-odd", {}),
    "chatglm": ("glm", {}),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores would make these tests many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", list(CASES))
def test_every_family_equals_transformers(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    model = make_reference(name, **changes)
    path = write_gguf(model, tmp_path / "m.gguf", fuse_qkv=case == "chatglm")
    harness, tokens = Harness(path, attention_backend="torch"), draw(LENGTH, 3)
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.3
    close(harness.forward((0, tokens[:141])), expected[:141])
    for position in range(141, LENGTH):
        close(harness.forward((0, tokens[position : position + 1])), expected[position : position + 1])


@pytest.mark.parametrize("case", ["chatglm", "phi3", "granite", "smollm3", "gemma2"])
def test_gguf_and_safetensors_give_the_same_keys(case: str, tmp_path: Path) -> None:
    """In the order of one engine: either may hand over to the other, were it not for the files' rounding."""
    name, changes = CASES[case]
    model = make_reference(name, **changes)
    model.save_pretrained(tmp_path / "hf")
    path = write_gguf(model, tmp_path / "m.gguf", fuse_qkv=case == "chatglm")
    one, two = Harness(tmp_path / "hf", attention_backend="torch"), Harness(path, attention_backend="torch")
    tokens = draw(40, 5)
    one.forward((0, tokens))
    two.forward((0, tokens))
    close(one.runner.pool.data, two.runner.pool.data)


@pytest.mark.parametrize(
    ("name", "changes", "fuse_qkv"),
    [
        # A part of each head turns, neighbours do, and everything is fused.
        ("glm", {"head_dim": 32, "partial_rotary_factor": 0.5}, True),
        ("phi3", {"sliding_window": None}, False),
    ],
)
def test_fused_blocks_are_served_as_they_are(
    name: str, changes: dict[str, Any], fuse_qkv: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    path = write_gguf(
        make_reference(name, **sizes | changes), tmp_path / "m.gguf", GGMLQuantizationType.Q8_0, fuse_qkv=fuse_qkv
    )
    tokens = draw(60, 6)
    exact = Harness(path, attention_backend="torch").forward((0, tokens))
    blocks = Harness(path, dtype="float32", quantization="gguf")
    assert (blocks.runner.attention_backend, blocks.runner.quantization) == ("cpu", "gguf")
    ours = torch.cat((blocks.forward((0, tokens[:50])), blocks.forward((0, tokens[50:]))))
    # Rounding activations to 8 bits costs some percent of so wild a model; a wrong row costs everything.
    assert 1e-4 < (ours - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attn_logit_softcapping", 5.0, "llama.attn_logit_softcapping 5.0 is not supported"),
        ("residual_scale", 0.5, "llama.residual_scale 0.5 is not supported"),
        ("expert_count", 8, "llama.expert_count 8 is not supported"),
        ("attention.causal", False, "llama.attention.causal False is not supported"),
        ("attention.value_length", 4, "keys and values of different sizes"),
        ("rope.scaling.type", "su", "rotary scaling 'su' is not supported"),
    ],
)
def test_what_the_metadata_say_is_not_ignored(key: str, value: object, says: str, tmp_path: Path) -> None:
    path = write_gguf(make_reference("llama"), tmp_path / "m.gguf", more={key: value})
    with pytest.raises(UnsupportedModel, match=says):
        read_spec(ModelSource("gguf", path))
