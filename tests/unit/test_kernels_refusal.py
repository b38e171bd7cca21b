"""Which families the CPU engine computes itself: all, in sizes that it can take; and what it says of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import FAMILIES, make_config

from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_runner.kernels.lowering import refusal

# Heads of 16 and even sizes.
SIZES = {"head_dim": 16, "intermediate_size": 64}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "long" not in name])
def test_every_family_is_computed(name: str) -> None:
    sizes = SIZES | ({} if "head_dim" in FAMILIES[name][1] else {"hidden_size": 96})
    assert refusal(spec_from_hf(make_config(name, **sizes).to_dict()), torch.bfloat16, torch.bfloat16) is None


def test_types_and_sizes() -> None:
    spec = spec_from_hf(make_config("llama", hidden_size=96).to_dict())
    assert "float16" in str(refusal(spec, torch.float16, torch.float16))
    fewer = replace(spec.layers[1].attention, heads=spec.layers[1].attention.kv_heads)
    layers = (spec.layers[0], replace(spec.layers[1], attention=fewer), *spec.layers[2:])
    assert "layers[1].attention.heads" in str(refusal(replace(spec, layers=layers), torch.bfloat16, torch.bfloat16))
    spec = spec_from_hf(make_config("llama").to_dict())
    assert "multiple of 16, not 8" in str(refusal(spec, torch.bfloat16, torch.bfloat16))
