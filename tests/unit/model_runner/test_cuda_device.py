"""``CudaDevice`` with torch's calls replaced: what it does with their errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdserve.model_runner.device.cuda import CudaDevice


class BrokenCapture:
    """``torch.cuda.graph``: the end of a capture in which something failed raises an error of its own."""

    def __init__(self, *_args: object, **_more: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")


def device_that_captures_by(capture: type, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    fake = {"graph": capture, "CUDAGraph": SimpleNamespace, "graph_pool_handle": lambda: (0, 1)}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    device = CudaDevice.__new__(CudaDevice)
    device.torch, device._graph_memory = torch.device("cuda"), None
    return device


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("tried to allocate 2.00 GiB"), "tried to allocate 2.00 GiB"),
        (RuntimeError("an operation that no graph can hold"), "an operation that no graph can hold"),
        (ValueError("a fault"), "a fault"),
    ],
)
def test_a_broken_capture_says_what_broke_it(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    device = device_that_captures_by(BrokenCapture, monkeypatch)

    def run() -> None:
        raise error

    with pytest.raises(type(error), match=message):
        device.capture(run)


def test_a_kernel_s_code_that_does_not_fit_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_that_captures_by(BrokenCapture, monkeypatch)

    def run() -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="Triton Error"):
        device.capture(run)


class FullDriver(BrokenCapture):
    """A capture that ends when the driver has no memory for the graph."""

    def __exit__(self, kind: object, *_rest: object) -> None:
        raise RuntimeError("CUDA error: out of memory")


def test_a_graph_that_the_driver_has_no_memory_for_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_that_captures_by(FullDriver, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA error"):
        device.capture(lambda: 1)
