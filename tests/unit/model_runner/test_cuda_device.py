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


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("tried to allocate 2.00 GiB"), "tried to allocate 2.00 GiB"),
        (RuntimeError("an operation that no graph can hold"), "previous error during capture"),
    ],
)
def test_a_capture_without_memory_says_so(monkeypatch: pytest.MonkeyPatch, error: RuntimeError, message: str) -> None:
    fake = {"graph": BrokenCapture, "CUDAGraph": SimpleNamespace, "graph_pool_handle": lambda: (0, 1)}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    device = CudaDevice.__new__(CudaDevice)
    device.torch, device._graph_memory = torch.device("cuda"), None

    def run() -> None:
        raise error

    with pytest.raises(type(error), match=message):
        device.capture(run)
