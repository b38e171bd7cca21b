"""A whole model by the fused operations, and attention by Triton, against plain torch: pass by pass the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, make_reference
from support.model_harness import Harness, close, draw
from support.triton_device import CAN_RUN, DEVICE

from pdserve.model_runner.loader import weight_loader
from pdserve.model_runner.ops.torch_ops import TorchOps
from pdserve.model_runner.ops.triton_ops import TritonOps
from tests.unit.model_runner.test_kernels_engine import save_model

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a GPU or Triton's interpreter")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["qwen3", "biased", "qwen3-moe", pytest.param("gpt-oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_fused_operations_compute_what_single_ones_do(monkeypatch, tmp_path: Path, name: str, attention: str) -> None:
    if name in FAMILIES:
        make_reference(name, **({"num_hidden_layers": 1} if name == "qwen3-moe" else {})).save_pretrained(tmp_path)
    else:
        save_model(tmp_path, name)
    prompts = [(0, draw(21, 1)), (1, draw(3, 2))]
    logits = []
    for ops, backend in ((TorchOps(), "torch"), (TritonOps(), attention)):
        monkeypatch.setattr(weight_loader, "choose_ops", lambda device, ops=ops: ops)
        harness = Harness(tmp_path, device=DEVICE.type, attention_backend=backend)
        logits.append(torch.cat((harness.forward(*prompts), harness.forward((0, [5]), (1, [6])))))
    close(logits[1], logits[0])
