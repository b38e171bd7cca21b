"""Ranks with a device each, played by recording devices: pools of their own, graphs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_threads import ThreadRank, make_apart, together
from support.recording_device import RecordingDevice
from support.static_attention import StaticAttention
from transformers import Qwen3Config, Qwen3ForCausalLM

from pdserve.messages.worker import CaptureGraphs, ForwardStep
from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_runner.engines import load
from pdserve.model_runner.engines import torch as torch_engine
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.ranks import world
from pdserve.model_runner.ranks.leading_steps import FollowingSteps, LeadingSteps
from pdserve.model_runner.ranks.on_devices import refuse_on_devices
from pdserve.model_runner.steps.step_runner import StepRunner
from pdserve.runtime.ranks import RankPlace
from pdserve.server.options import ServerOptions
from tests.unit.model_runner.test_decode_graphs import random_steps, same
from tests.unit.model_runner.test_kernels_engine import SHAPE
from tests.unit.model_runner.test_native_steps import CONTEXT, PAGE, ROWS, make_row, make_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    sizes = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(path)
    return path


@pytest.fixture
def devices(monkeypatch) -> list[RecordingDevice]:
    """Return the list of devices that are opened."""
    opened: list[RecordingDevice] = []

    def open_device(*_args: object, **_more: object) -> RecordingDevice:
        opened.append(RecordingDevice())
        return opened[-1]

    monkeypatch.setattr(load, "open_device", open_device)
    monkeypatch.setattr(torch_engine, "make_attention_backend", lambda name, needs: StaticAttention(*needs[:2]))
    return opened


def options(folder: Path, **changes: Any) -> ServerOptions:
    plain = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "max_total_tokens": ROWS * CONTEXT}
    plain |= {"attention_backend": "torch", "max_running_requests": ROWS}
    return ServerOptions(model_path=str(folder), **(plain | changes))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_pools_of_their_own_answer_as_one_with_graphs(folder, devices, size) -> None:
    """Four ranks share two KV heads: each keeps its own copy."""
    plain = StepRunner(_one(folder), ROWS)
    ranks = make_apart(size, options(folder, cuda_graph_bs="1,3"))
    assert all(rank.engine.graph_sizes == (1, 3) for rank in ranks)
    assert all(rank.pools.region is None and rank.pools.pool.heads == (0, 1) for rank in ranks)
    assert len({rank.pools.pool.data.data_ptr() for rank in ranks}) == size
    runners = [StepRunner(rank, ROWS) for rank in ranks]
    together(runners, StepRunner.capture_graphs)
    replays = 0
    for step in random_steps(1):
        same(together(runners, lambda runner, step=step: runner.run(step)), plain.run(step))
        replays = sum(line.startswith("replay") for line in devices[-1].log)
    assert replays > 5


def _one(folder: Path) -> LoadedModel:
    return load_model(options(folder, disable_cuda_graph=True))


def test_all_ranks_have_the_fewest_pages(folder, devices, monkeypatch) -> None:
    agree = ThreadRank.agree
    fewer = lambda self, _pages, identity: agree(self, 20 - 7 * self.place.rank, identity)  # noqa: E731
    monkeypatch.setattr(ThreadRank, "agree", fewer)
    ranks = make_apart(2, options(folder))
    assert {rank.pools.num_slots // PAGE for rank in ranks} == {len(rank.pools.pool.data) for rank in ranks} == {13}


def test_graphs_of_ranks_are_captured_where_they_are_asked_for(folder, devices, caplog) -> None:
    caplog.set_level("INFO")
    assert {rank.engine.graph_sizes for rank in make_apart(2, options(folder))} == {()}
    assert "--cuda-graph-max-bs or --cuda-graph-bs asks for them" in caplog.text
    assert "has not been tried on GPUs yet" in caplog.text
    assert {rank.engine.graph_sizes for rank in make_apart(2, options(folder, cuda_graph_max_bs=2))} == {(1, 2)}


class Told(list):
    """What a follower was sent."""

    send = list.append


def test_the_lead_says_when_graphs_are_captured_and_followers_are_one_step_behind(folder, devices) -> None:
    model = _one(folder)
    model.engine.graph_sizes = (1,)
    follower = Told()
    lead: Any = SimpleNamespace(place=RankPlace(0, 2), followers=[follower])
    leading, following = LeadingSteps(model, ROWS, lead), FollowingSteps(model, ROWS)
    leading.capture_graphs()
    assert follower == [CaptureGraphs()]
    following.capture_graphs()
    assert not following.executor.graphs._graphs
    following.capture_with_lead()
    assert following.executor.graphs._graphs
    log = devices[-1].log
    log.clear()
    first = make_step([(0, 0, [5, 6], True)], new_rows=[make_row(0, 2)])
    for i, step in enumerate((first, make_step([(0, 2, None, True)]), make_step([(0, 3, None, True)]))):
        following.follow(step)
        assert log.count("wait") == i
    following.settle()
    assert log.count("wait") == 3
    leading.launch(first)
    assert isinstance(follower[-1], ForwardStep)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"disaggregation_mode": "prefill"}, "one GPU (--tp-size 1)"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"kv_debug": True}, "leave out --kv-debug"),
        ({"nnodes": 2}, "--nnodes 2"),
    ],
)
def test_what_pools_of_their_own_do_not_allow_is_refused(changes: dict[str, Any], says: str) -> None:
    asked = replace(ServerOptions(tp_size=4), **changes)
    with pytest.raises(UnsupportedModel) as caught:
        refuse_on_devices(asked, RankPlace(0, 4, asked.nnodes))
    assert says in str(caught.value)


class Group:
    """Group of two ranks, which give the same."""

    def size(self) -> int:
        return 2


def test_gpus_meet_by_nccl_on_the_loopback_interface_once(monkeypatch) -> None:
    made, gathered = [], []
    monkeypatch.setattr(world, "_made", lambda group: group)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda **how: made.append(how["backend"]) or Group())
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda out, own, group: gathered.append(len(out)))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.ones(*shape))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    one = world.World.__new__(world.World)
    one.model, one._devices = Group(), None  # type: ignore[assignment]
    for _ in range(2):
        one.torch_ranks(10, torch.device("cuda", 1))
    one.torch_ranks(10, torch.device("cpu"))
    assert (made, gathered) == (["nccl"], [8])  # the first meeting
    assert world.os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    one._devices = None
    with pytest.raises(UnsupportedModel, match="needs NCCL"):
        one.torch_ranks(10, torch.device("cuda", 0))
