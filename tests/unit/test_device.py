"""The recording device itself: it must notice what a GPU would wait for, or the tests that rely on it prove nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.recording_device import RecordingDevice

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_runner.device.base import HostSync
from pdserve.model_runner.device.choice import choose_device, open_device

X = torch.arange(6.0)

WAITS = {
    "item": lambda: X[2].item(),
    "truth": lambda: bool(X.any()),
    "list": lambda: X.tolist(),
    "host": lambda: X.cpu(),
    "array": lambda: X.numpy(),
    "mask": lambda: X[X > 2],
    "masked write": lambda: X.clone().__setitem__(X > 2, 0.0),
    "nonzero": lambda: X.nonzero(),
    "copied": lambda: torch.from_numpy(np.ones(2)).to(torch.device("cpu")),
    "made": lambda: torch.tensor([1, 2]),
    "float": lambda: float(X[0]),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_a_device_would_wait_for_raises(name: str) -> None:
    device = RecordingDevice()
    WAITS[name]()
    with device.no_sync(), pytest.raises(HostSync):
        WAITS[name]()


def test_what_is_queued_does_not_wait() -> None:
    device = RecordingDevice()
    pinned = device.host_zeros((3,), torch.int64)
    with device.no_sync():
        pinned.numpy()[:] = [1, 2, 3]
        there = torch.zeros(3, dtype=torch.int64)
        device.send(there, pinned)
        there = there[device.upload(np.array([2, 0]))].to(torch.int32) + torch.arange(2, device=device.torch)
        fetched = device.fetch([there, there > 2])
        with pytest.raises(HostSync, match="wait"):
            fetched.wait()
    assert [array.tolist() for array in fetched.wait()] == [[3, 2], [True, False]]
    assert device.log == ["send", "upload", "fetch", "wait"]


def test_transfers_go_between_host_and_device_in_both_directions() -> None:
    for device in (RecordingDevice(), open_device(torch.device("cpu"))):
        here, there = device.host_zeros((4,), torch.uint8), torch.arange(4, dtype=torch.uint8)
        device.transfer([(here[:2], there[2:]), (here[2:], there[:2])])
        assert here.tolist() == [2, 3, 0, 1]
        device.transfer([(there, here)])
        assert there.tolist() == [2, 3, 0, 1]


def test_uploads_are_copies() -> None:
    for device in (RecordingDevice(), open_device(torch.device("cpu"))):
        array = np.array([1, 2])
        there = device.upload(array)
        array[0] = 9
        assert there.tolist() == [1, 2]
        assert device.upload(np.frombuffer(b"\0" * 8, dtype=np.int32)).tolist() == [0, 0]


def test_nothing_is_sent_or_fetched_while_capturing() -> None:
    device = RecordingDevice()
    for what in (lambda: device.upload(np.zeros(1)), lambda: device.fetch([X]), device.synchronize):
        with pytest.raises(HostSync):
            device.capture(what)
    graph = device.capture(lambda: X.reshape(2, 3).sum(0))
    graph.replay()
    assert graph.output.tolist() == [3.0, 5.0, 7.0]


def test_which_gpu_is_a_number_among_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda:1")
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(UnsupportedModel, match=r"GPU 2 is asked for \(--base-gpu-id"):
        choose_device("cuda", 2)
