"""Instances with a GPU: no thread is bound to a core, and kernels are launched near the GPU."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdserve.model_runner import start_model
from pdserve.model_runner.device.gpu_placement import MOST_THREADS, beside_gpu, stay_near
from pdserve.model_runner.device.placement import ThreadPlacement, plan_placement
from pdserve.model_runner.engines import load
from pdserve.model_runner.engines.load_setup import Threads
from pdserve.runtime.machine.control_groups import SystemTree
from pdserve.runtime.machine.gpus import may_use_gpu, numa_node_of
from pdserve.server.options import ServerOptions
from tests.unit.runtime.test_placement import machine

HOST = machine(128, nodes=2)


@pytest.mark.parametrize("box", [HOST, machine(16, smt=2), machine(2)])
def test_no_thread_is_bound_and_all_cores_may_be_used(box) -> None:
    alone = plan_placement(None, None, box)
    assert alone.cpus is not None  # each of a host's instances would choose these
    placement = beside_gpu(alone, named=False)
    assert (placement.cpus, placement.home, placement.node) == (None, box.allowed, None)
    assert 1 <= placement.threads <= MOST_THREADS
    assert "beside the GPU, bound to no core" in placement.reason


def test_cores_that_are_named_are_kept_to() -> None:
    placement = beside_gpu(plan_placement(None, "64-67", HOST), named=True)
    assert (placement.cpus, placement.home, placement.node, placement.threads) == (None, {64, 65, 66, 67}, 1, 4)


def test_the_node_of_a_gpu_is_what_the_kernel_tells(tmp_path: Path) -> None:
    tree = SystemTree(tmp_path / "proc", tmp_path)
    for address, text in (("0000:3b:00.0", "1\n"), ("0000:3c:00.0", "-1\n")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    assert [numa_node_of(f"0000:{bus}:00.0", tree) for bus in ("3B", "3c", "3d")] == [1, None, None]


def test_a_gpu_is_looked_for_without_torch(tmp_path: Path) -> None:
    assert may_use_gpu("cuda", tmp_path)
    assert not may_use_gpu("auto", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not may_use_gpu("auto", tmp_path)
    (tmp_path / "nvidia1").touch()
    assert may_use_gpu("auto", tmp_path)
    assert not may_use_gpu("cpu", tmp_path)
    (tmp_path / "nvidia1").rename(tmp_path / "dxg")
    assert may_use_gpu("auto", tmp_path)


def test_the_launching_thread_stays_near_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: moved.append(cores))
    for node, box in ((1, HOST), (None, HOST), (2, HOST), (0, machine(8))):
        stay_near(node, box)
    assert moved == [HOST.nodes[1]]


@pytest.mark.parametrize("has_cuda", [True, False])
def test_a_worker_is_placed_by_what_it_computes_on(monkeypatch: pytest.MonkeyPatch, has_cuda: bool) -> None:
    """A host may have a GPU that its torch knows nothing of."""
    placed: list[tuple[str, ThreadPlacement | int | None]] = []

    def load_model(options, threads, ranks, weights_source) -> SimpleNamespace:
        threads.start_torch()
        placed.append(("cpus", threads.cpus))
        engine, device = SimpleNamespace(attention_backend="triton"), SimpleNamespace(numa_node=lambda: 1)
        return SimpleNamespace(engine=engine, device=device, load_seconds={})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(load, "load_model", load_model)
    for name, value in (("read_machine", lambda: HOST), ("may_use_gpu", lambda device: True)):
        monkeypatch.setattr(start_model, name, value)
    for name in ("confine", "start_torch_threads"):
        monkeypatch.setattr(start_model, name, lambda placement, name=name: placed.append((name, placement)))
    for name in ("prefer_node", "stay_near"):
        monkeypatch.setattr(start_model, name, lambda node, box, name=name: placed.append((name, node)))
    monkeypatch.setattr(start_model, "_make_steps", lambda *args: None)
    ctx = SimpleNamespace(options=ServerOptions(device="auto"), name="worker")
    started = start_model.start_model(ctx, start_model.LeadChannels((), None))
    bound = None if has_cuda else plan_placement(None, None, HOST).cpus
    assert [name for name, _ in placed] == ["confine", "start_torch_threads", "cpus", "prefer_node"]
    assert [value.cpus for _, value in placed[:2]] == [bound, bound]
    assert placed[2:] == [("cpus", bound), ("prefer_node", 1)]
    started.settle()
    assert placed[-1] == ("stay_near", 1)


def test_compilers_do_not_inherit_the_cores_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling: list[bool] = []

    @contextmanager
    def floating():
        compiling.append(True)
        yield
        compiling.pop()

    def choose(*args: object) -> str:
        # Builds the CPU kernels if there are none yet.
        assert compiling
        raise KeyError

    monkeypatch.setattr(load, "choose_attention_backend", choose)
    with pytest.raises(KeyError):
        load.load_model(ServerOptions(model_path="smollm2", device="cpu"), Threads(compiling=floating))
