"""What of a model the CPU engine names as lacking, for torch to serve it."""

from __future__ import annotations

import pytest
import torch
from support.families import FAMILIES, make_config

from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_runner.kernels.cpu_engine import refusal

# Heads of 16 and even sizes, so that nothing else is in the way.
SIZES = {"head_dim": 16, "intermediate_size": 64}
CASES: dict[str, tuple[str, ...]] = {
    "llama": (),
    "llama-yarn": (),
    "qwen2": (),
    "qwen3": (),
    "glm": (),
    "phi3": ("windows",),
    "llama-biased": ("the activation gelu",),
    "mistral-window": ("windows",),
    "smollm3": ("layers that differ",),
    "smollm3-window": ("layers that differ", "layers without positions", "windows"),
    "qwen2-window": ("layers that differ",),
    "gemma2": (
        "layers that differ",
        "post norms",
        "the activation gelu_tanh",
        "windows",
        "soft caps of attention",
        "an attention scale",
        "an embedding scale",
        "soft caps of logits",
    ),
    "gemma3": ("post norms", "several ropes"),
    "olmo2": ("layers without norms before them", "post norms", "norms of all heads of q and k together"),
    "granite": ("an attention scale", "a residual scale", "an embedding scale", "a logit scale"),
    "glm4": ("post norms",),
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_lacking_is_named(name: str) -> None:
    sizes = SIZES | ({} if "head_dim" in FAMILIES[name][1] else {"hidden_size": 96})
    reason = refusal(spec_from_hf(make_config(name, **sizes).to_dict()), torch.bfloat16, torch.bfloat16)
    if CASES[name]:
        assert reason is not None
        assert reason.startswith("they lack ")
        assert [part for part in CASES[name] if part not in reason] == []
    else:
        assert reason is None


def test_types_and_sizes() -> None:
    spec = spec_from_hf(make_config("llama", hidden_size=96).to_dict())
    assert "float16" in str(refusal(spec, torch.float16, torch.float16))
    spec = spec_from_hf(make_config("llama").to_dict())
    assert "multiple of 16, not 8" in str(refusal(spec, torch.bfloat16, torch.bfloat16))
