"""The recording device itself: it must notice what a GPU would wait for, or the tests that rely on it prove nothing."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support.poisoned_memory import FreedMemory
from support.recording_device import RecordingDevice

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_runner.device import choice
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
    for device in (RecordingDevice(), open_device("cpu")):
        here, there = device.host_zeros((4,), torch.uint8), torch.arange(4, dtype=torch.uint8)
        device.transfer([(here[:2], there[2:]), (here[2:], there[:2])])
        assert here.tolist() == [2, 3, 0, 1]
        device.transfer([(there, here)])
        assert there.tolist() == [2, 3, 0, 1]


def test_uploads_are_copies() -> None:
    for device in (RecordingDevice(), open_device("cpu")):
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


def test_a_graph_does_not_keep_what_it_reads() -> None:
    device, x, at = RecordingDevice(), torch.arange(6.0), torch.tensor([1, 4])
    graph = device.capture(lambda: (x * 2).index_select(0, at))
    x += 1
    graph.replay()
    assert graph.output.tolist() == [4.0, 10.0]
    at = torch.tensor([1, 4])
    with pytest.raises(FreedMemory, match=r"graph 0, aten.index_select.default: torch.int64 \[2\] was freed"):
        graph.replay()


def test_what_graphs_compute_in_between_is_not_theirs_between_replays() -> None:
    device, kept = RecordingDevice(), []
    graph = device.capture(lambda: kept.append(X * 2) or kept[0] + 1)
    graph.replay()
    assert graph.output.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    [between] = kept
    graph.replay()
    between[0] = 99
    graph.replay()
    assert (graph.output[0].item(), between[0].item()) == (1.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32], ids=str)
def test_memory_that_was_freed_or_never_written_is_poison(dtype: torch.dtype) -> None:
    with RecordingDevice():
        here = torch.arange(4).to(dtype)
        assert here.data_ptr() % 16 == 8
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * here.nbytes).from_address(here.data_ptr()))
        del here
        for read in (torch.from_numpy(memory).view(dtype), torch.empty(4, dtype=dtype)):
            assert bool((read.isnan() if dtype.is_floating_point else read > 2**30).all())


def test_tensors_that_are_fetched_are_read_when_they_are_waited_for() -> None:
    device, x = RecordingDevice(), torch.ones(2)
    fetched = device.fetch([x])
    x += 1
    assert fetched.wait()[0].tolist() == [2.0, 2.0]


def test_which_gpu_is_a_number_among_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "may_use_gpu", lambda name: name != "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == choose_device("cuda", 1) == "cuda:1"
    assert choose_device("cpu", 1) == "cpu"
    with pytest.raises(UnsupportedModel, match=r"GPU 2 is asked for \(--base-gpu-id"):
        choose_device("cuda", 2)
