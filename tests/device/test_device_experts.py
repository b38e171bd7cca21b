"""A layer of experts by the fused operations against torch's: the same sums, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch
from support.recording_device import RecordingDevice
from support.triton_device import DEVICE, INTERPRETED, there

from pdserve.model_runner.device.choice import open_device
from pdserve.model_runner.models.experts import Experts
from pdserve.model_runner.ops import grouped_experts
from pdserve.model_runner.ops.reference import linear
from pdserve.model_runner.ops.torch_ops import TorchOps
from pdserve.model_runner.ops.triton_ops import TritonOps
from tests.unit.model_files.test_experts import HIDDEN, SPECS, draw, make_experts

SAMPLE = ("clamped", "groups by their largest")
FUSED = TritonOps()


def on_device(experts: Experts) -> Experts:
    copied = Experts(experts.spec, HIDDEN, dtype=torch.float32, device=DEVICE)
    for view, values in zip(copied.weights("x").values(), experts.weights("x").values(), strict=True):
        view.copy_(values)
    return copied


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in SPECS]
)
def test_nothing_waits_for_the_choice(name: str, monkeypatch) -> None:
    reference, x = make_experts(SPECS[name]), draw(19)
    experts, device = on_device(reference), RecordingDevice() if INTERPRETED else open_device(str(DEVICE), strict=True)
    x_there = there(x)
    whole = experts.forward(x_there, FUSED)  # compiles, where it must
    with device.no_sync():
        out = experts.forward(x_there, FUSED)
    torch.testing.assert_close(out.cpu(), reference.forward(x, TorchOps()), atol=1e-4, rtol=1e-4)
    assert torch.equal(out, whole)
    assert FUSED.waits_for_experts(experts.networks) is None
    # Nor does it matter that a chunk is too long for all of its pairs to be multiplied at once.
    monkeypatch.setattr(grouped_experts, "MOST_PAIRS", 16 * experts.spec.chosen)
    torch.testing.assert_close(experts.forward(x_there, FUSED), whole, atol=1e-5, rtol=1e-5)
    assert experts.forward(x_there[:0], FUSED).shape == (0, HIDDEN)


def test_experts_with_packed_weights_are_looked_through() -> None:
    experts, x = on_device(make_experts(SPECS["softmax"])), there(draw(5))
    expected = experts.forward(x, TorchOps())
    one = experts.down_proj.experts[3]
    matrix = one.weight.clone()
    one.weight.fill_(float("nan"))
    one.use_packed(object(), lambda x, packed, bias: linear(x, matrix, bias))
    assert "packed weights" in FUSED.waits_for_experts(experts.networks)
    assert torch.equal(experts.forward(x, FUSED), expected)
