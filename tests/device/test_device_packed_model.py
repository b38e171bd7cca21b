"""Whole models with packed weights against the same ones dequantised: pass by pass the same logits, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import make_reference
from support.model_harness import Harness, close, draw
from support.packed_checkpoints import packed_checkpoint
from support.triton_device import CAN_RUN, DEVICE

from pdserve.model_runner.engines.load import load_model
from pdserve.server.options import ServerOptions

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a GPU or Triton's interpreter")

SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 3}
SIZES |= {"num_key_value_heads": 1, "head_dim": 32}
LATENT = {"hidden_size": 64, "q_lora_rank": 64, "v_head_dim": 16, "moe_intermediate_size": 32, "intermediate_size": 64}
LATENT |= {"num_hidden_layers": 2, "first_k_dense_replace": 1}
MODELS: dict[str, dict[str, Any]] = {"llama": SIZES, "glm4": SIZES, "deepseek-v3": LATENT}
FORMS = ("fp8 blocks of 128", "fp8 matrix", "fp8 rows", "awq", "gptq v2 by activation", "gptq")
SAMPLE = {
    ("fp8 blocks of 128", "llama"),
    ("fp8 rows", "deepseek-v3"),
    ("awq", "glm4"),
    ("gptq v2 by activation", "llama"),
}


def harness(folder: Path, quantization: str, **options: Any) -> Harness:
    return Harness(folder, device=DEVICE.type, attention_backend="torch", quantization=quantization, **options)


def logits_of(one: Harness) -> torch.Tensor:
    """Return the logits of two prompts together, and of the next token of one."""
    return torch.cat((one.forward((0, draw(8, 1)), (1, draw(3, 2))), one.forward((1, [9])))).cpu()


def make(name: str, folder: Path, form: str) -> Path:
    (folder / "plain").mkdir()
    model = make_reference(name, **MODELS[name])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(folder / "plain")
    return packed_checkpoint(folder / "plain", folder, form).source.path


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=() if (form, name) in SAMPLE else pytest.mark.slow)
        for form in FORMS
        for name in MODELS
    ],
)
def test_packed_weights_compute_what_dequantised_ones_do(tmp_path: Path, name: str, form: str) -> None:
    """In float32 the order of sums is all that differs."""
    folder = make(name, tmp_path, form)
    packed, dense = harness(folder, "packed"), harness(folder, "none")
    assert packed.runner.quantization == "packed"
    assert packed.runner.fingerprint == dense.runner.fingerprint
    close(logits_of(packed), logits_of(dense))
    assert packed.runner.weight_bytes < dense.runner.weight_bytes
    assert packed.runner.engine.step_weight_bytes < dense.runner.engine.step_weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[:4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_too(tmp_path: Path, dtype: str, form: str) -> None:
    """Dequantised weights are rounded alike; results are rounded in other places where sums were added up otherwise."""
    folder = make("llama", tmp_path, form)
    packed, dense = (logits_of(harness(folder, quantization, dtype=dtype)) for quantization in ("packed", "none"))
    error = (packed - dense).abs().max() / dense.std()
    assert error < (0.05 if dtype == "bfloat16" else 0.01), error


@pytest.mark.parametrize("form", ["fp8 rows", pytest.param("fp8 blocks of 128", marks=pytest.mark.slow)])
def test_activations_in_fp8_are_near(tmp_path: Path, form: str) -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU multiplies no FP8")
    folder = make("llama", tmp_path, form)
    rounded, dense = harness(folder, "w8a8"), harness(folder, "none")
    assert rounded.runner.fingerprint != dense.runner.fingerprint
    one, other = logits_of(rounded), logits_of(dense)
    # Three bits of fraction an activation: they come through two layers.
    assert (one - other).pow(2).mean().sqrt() / other.std() < 0.1
    assert (one - other).abs().max() > 1e-3


def test_given_back_and_taken_again_they_compute_as_before(tmp_path: Path) -> None:
    one = harness(make("llama", tmp_path, "gptq"), "packed", dtype="bfloat16")
    dense = harness(tmp_path / "packed", "none", dtype="bfloat16")
    # KV goes from one to the other.
    dense.forward((0, [8, 9]))
    one.take_over(2, dense.hand_over(0))
    first, nbytes = one.forward((0, [3])), one.runner.weight_bytes
    one.runner.engine.drop_weights()
    one.runner.engine.take_weights()
    assert one.runner.engine._reload().nbytes == nbytes
    assert torch.equal(one.forward((1, [3])), first)


@pytest.mark.parametrize("quant_method", ["fp8", "awq"])
def test_random_ones_compute(tmp_path: Path, quant_method: str) -> None:
    folder = tmp_path / "config"
    model = make_reference("llama", **SIZES)
    quantised = {"quant_method": quant_method, "bits": 4, "weight_block_size": [128, 128]}
    model.config.quantization_config = quantised
    model.config.save_pretrained(folder)
    options = {"dtype": "bfloat16", "device": DEVICE.type, "attention_backend": "torch", "load_format": "dummy"}
    runner = load_model(
        ServerOptions(model_path=str(folder), quantization="packed", max_total_tokens=256, **options)  # type: ignore[arg-type]
    )
    assert runner.quantization == "packed"
    logits = Harness(folder, **options, quantization="packed").forward((0, draw(5, 1)))
    assert logits.isfinite().all()
    assert logits.std() > 0
