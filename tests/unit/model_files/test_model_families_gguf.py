"""GGUF files by llama.cpp's conventions, beyond what every family is measured by (``test_models_page.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from support.families import make_reference
from support.gguf_export import write_gguf
from support.model_harness import Harness, close, draw, reference_logits
from support.model_tables import LARGEST

LENGTH = 60
# What a file does not say, and the number of its layers tells: the largest Gemma 2 scales scores by another size, and
# which layers of a Gemma 3 see the whole context repeats itself.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2-largest": ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 8}),
    "gemma3-more": ("gemma3", {"num_hidden_layers": 13, "num_key_value_heads": 3}),
}
SAME_KEYS = ["glm", "phi3", "granite", "smollm3", "gemma2", "mixtral", "gpt-oss"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES)
def test_what_the_number_of_layers_says(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    model = make_reference(name, **changes)
    path = write_gguf(model, tmp_path / "m.gguf")
    harness, tokens = Harness(path, attention_backend="torch"), draw(LENGTH, 3)
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.3
    logits = torch.cat((harness.forward((0, tokens[:50])), harness.forward((0, tokens[50:]))))
    assert (logits - expected).abs().max() < LARGEST


@pytest.mark.parametrize("name", SAME_KEYS)
def test_gguf_and_safetensors_give_the_same_keys(name: str, tmp_path: Path) -> None:
    """In the order of one engine: either may hand over to the other, were it not for the files' rounding."""
    model = make_reference(name)
    model.save_pretrained(tmp_path / "hf")
    path = write_gguf(model, tmp_path / "m.gguf", fuse_qkv=name == "glm")
    one, two = Harness(tmp_path / "hf", attention_backend="torch"), Harness(path, attention_backend="torch")
    tokens = draw(40, 5)
    one.forward((0, tokens))
    two.forward((0, tokens))
    close(one.runner.pools.pool.data, two.runner.pools.pool.data)


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
    assert (blocks.runner.engine.attention_backend, blocks.runner.quantization) == ("cpu", "gguf")
    ours = torch.cat((blocks.forward((0, tokens[:50])), blocks.forward((0, tokens[50:]))))
    assert (ours - exact).norm() / exact.norm() < 1e-3


def test_latent_attention_of_older_files(tmp_path: Path) -> None:
    """Keys and values of all heads in one matrix."""
    model, tokens = make_reference("deepseek-v3"), draw(LENGTH, 3)
    path = write_gguf(model, tmp_path / "m.gguf", expanded=True)
    close(Harness(path, attention_backend="torch").forward((0, tokens)), reference_logits(model, tokens))


@pytest.mark.parametrize("q_lora_rank", [32, None])
def test_blocks_of_latent_attention_are_served_as_they_are(q_lora_rank: int | None, tmp_path: Path) -> None:
    """Queries and the row are multiplied with together, in formats of their own."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    # Without experts: their choice changes with the rounding of activations.
    sizes |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32, "first_k_dense_replace": 3}
    path = write_gguf(
        make_reference("deepseek-v3", **sizes, q_lora_rank=q_lora_rank),
        tmp_path / "m.gguf",
        GGMLQuantizationType.Q8_0,
        kinds={"attn_kv_a_mqa": GGMLQuantizationType.Q5_1},
    )
    tokens = draw(60, 6)
    exact = Harness(path, attention_backend="torch").forward((0, tokens))
    blocks = Harness(path, dtype="float32", quantization="gguf")
    assert (blocks.runner.engine.attention_backend, blocks.runner.quantization) == ("cpu", "gguf")
    ours = torch.cat((blocks.forward((0, tokens[:50])), blocks.forward((0, tokens[50:]))))
    assert (ours - exact).norm() / exact.norm() < 1e-3
