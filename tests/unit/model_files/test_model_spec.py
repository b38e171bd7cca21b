"""Models that can't be: sizes of nothing, more experts chosen than there are. They are refused, and not loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import make_config, make_reference
from support.gguf_export import write_gguf
from support.model_harness import Harness, close, draw, reference_logits

from pdserve.model_files.errors import InvalidWeights, UnsupportedModel
from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.spec_reader import read_spec


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "6 experts can't be chosen of 5"),
        ("mixtral", {"num_experts_per_tok": 0}, "chosen 0"),
        ("mixtral", {"sliding_window": -3}, "window -3"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "inner 0"),
        ("gpt-oss", {"swiglu_limit": 0.0}, "a limit of 0.0"),
        ("deepseek-v3", {"n_group": 3}, "2 of 3 groups of 8 experts"),
        ("deepseek-v3", {"n_group": 4, "topk_group": 5}, "5 of 4 groups"),
        ("deepseek-v3", {"n_group": 4, "topk_group": 1}, "3 experts can't be chosen of 2"),
        ("deepseek-v3", {"n_group": 8, "topk_group": 4}, "8 groups of one expert"),
        ("deepseek-v3", {"q_lora_rank": 0}, "q_lora_rank 0"),
        ("deepseek-v3", {"v_head_dim": 0}, "v_head_dim 0"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(name: str, fields: dict[str, Any], message: str) -> None:
    raw = make_config(name).to_dict()
    spec_from_hf(raw)
    with pytest.raises(UnsupportedModel, match=message):
        spec_from_hf(raw | fields)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("deepseek-v3", "expert_gating_func", 7, "expert_gating_func 7"),
        ("llama", "rope.dimension_count", 500, "500 of 16 elements"),
        ("llama", "attention.head_count", 0, "heads 0"),
        ("llama", "embedding_length", "y", r"m\.gguf: embedding_length 'y' can't be used"),
    ],
)
def test_metadata_that_mean_nothing_are_refused(
    name: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    file = write_gguf(make_reference(name), tmp_path / "m.gguf", more={key: value})
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(ModelSource("gguf", file))


def test_a_scale_of_nought_is_none(tmp_path: Path) -> None:
    file = write_gguf(make_reference("deepseek-v3"), tmp_path / "m.gguf", more={"expert_weights_scale": 0.0})
    assert read_spec(ModelSource("gguf", file)).layers[-1].mlp.weight_scale == 1.0  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_a_deepseek_without_shared_experts(engine: str, tmp_path: Path) -> None:
    model = make_reference("deepseek-v3", n_shared_experts=0)
    model.save_pretrained(tmp_path)
    harness = Harness(tmp_path, attention_backend=engine)
    tokens = draw(40, 1)
    close(harness.forward((0, tokens)), reference_logits(model, tokens))


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("mixtral", "experts.0.w1", lambda t: t.sum(), "is a single number"),
        ("gpt-oss", "experts.gate_up_proj", lambda t: t.sum(), "is a single number"),
        ("mixtral", "experts.0.w1", lambda t: t.to(torch.int8), "is of int8, not of a float type"),
        ("deepseek-v3", "kv_b_proj", lambda t: t[:, 0], "is no matrix"),
    ],
)
def test_tensors_that_can_be_no_weights_are_refused(
    name: str, part: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    make_reference(name).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    found = next(name for name in tensors if part in name)
    save_file(tensors | {found: change(tensors[found]).contiguous()}, file)
    with pytest.raises(InvalidWeights, match=message):
        Harness(tmp_path, attention_backend="torch")


@pytest.mark.parametrize("part", ["sinks", "router.weight"])
@pytest.mark.parametrize("engine", ["torch", "cpu"])
def test_a_sink_or_a_router_that_is_no_number_is_seen(engine: str, part: str, tmp_path: Path) -> None:
    model = make_reference("gpt-oss")
    next(values for name, values in model.named_parameters() if name.endswith(part)).data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    assert Harness(tmp_path, attention_backend=engine).forward((0, draw(20, 1))).isnan().all()
