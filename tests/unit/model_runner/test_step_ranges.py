"""``--enable-nvtx``: a step's phases and layers have names, and tokens stay; without it, nothing is there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.recording_device import RecordingDevice
from support.static_attention import StaticAttention

from pdserve.messages.base import unpack_i32
from pdserve.messages.profiling import StartProfile
from pdserve.model_runner.engines import load
from pdserve.model_runner.engines import torch as torch_engine
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.profiler import RankProfiler
from pdserve.model_runner.ranks.leading_steps import FollowingSteps
from pdserve.model_runner.start_model import _make_steps
from pdserve.model_runner.steps import step_ranges
from pdserve.model_runner.steps.step_runner import StepRunner
from pdserve.server.options import ServerOptions
from tests.unit.model_runner.test_kernels_engine import save_model
from tests.unit.model_runner.test_native_steps import ROWS, make_model, make_row, make_step

PROMPT = [5, 6, 7]
PHASES = ["prepare", "forward", ["layer 0", "layer 1", "layer 2"], "sample", "logprobs", "copy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def ranges(monkeypatch) -> list:
    """The ranges that were entered: each by its name, followed by the list of those within it if there were any."""
    top: list = []
    open_lists = [top]

    @contextmanager
    def noted(name: str, device: torch.device) -> Iterator[None]:
        open_lists[-1].append(name)
        open_lists.append([])
        yield
        inner = open_lists.pop()
        if inner:
            open_lists[-1].append(inner)

    monkeypatch.setattr(step_ranges, "make_range", noted)
    return top


def steps_of(folder: Path, **options) -> StepRunner:
    options = {"attention_backend": "torch", "max_running_requests": ROWS} | options
    model = make_model(folder, dtype="float32", **options)
    return _make_steps(model, ServerOptions(model_path=str(folder), **options), None)


def answer(steps: StepRunner, count: int = 3) -> list[int]:
    tokens = []
    step = make_step([(0, 0, PROMPT, True)], new_rows=[make_row(0, len(PROMPT))])
    for i in range(count):
        tokens += unpack_i32(steps.run(step).next_tokens).tolist()
        step = make_step([(0, len(PROMPT) + i, None, True)])
    return tokens


def test_phases_and_layers_have_names_and_tokens_stay(folder, ranges) -> None:
    before = answer(steps_of(folder))
    assert ranges == []
    steps = steps_of(folder, enable_nvtx=True)
    assert answer(steps, 1) == before[:1]
    assert ranges == ["step 1: 1 entries, 3 tokens", PHASES, "wait"]
    ranges.clear()
    assert answer(steps) == before


def test_a_graphs_replay_has_a_name_and_nothing_waits(folder, ranges, monkeypatch) -> None:
    with RecordingDevice() as device:
        monkeypatch.setattr(load, "open_device", lambda *args, **more: device)
        monkeypatch.setattr(torch_engine, "make_attention_backend", lambda name, needs: StaticAttention(*needs[:2]))
        steps = steps_of(folder, enable_nvtx=True, cuda_graph_bs="2")
        steps.capture_graphs()
        ranges.clear()
        assert len(answer(steps, 2)) == 2
    assert ranges[:2] == ["step 1: 1 entries, 3 tokens", PHASES]
    assert ranges[3:] == ["step 1: 1 entries, 1 tokens", ["prepare", "replay 2", "sample", "logprobs", "copy"], "wait"]


def test_weights_that_come_back_have_their_names_again(folder, ranges) -> None:
    steps = steps_of(folder, enable_nvtx=True)
    model = steps._model
    assert isinstance(model, LoadedModel)
    model.engine.drop_weights()
    model.engine.take_weights()
    answer(steps, 1)
    assert ranges[1] == PHASES


def test_without_the_option_no_class_and_no_call_is_another(folder) -> None:
    steps = steps_of(folder)
    assert type(steps) is StepRunner
    assert steps._model.engine._wrap_layer is None
    ranged = step_ranges.with_ranges(FollowingSteps)
    assert issubclass(ranged, FollowingSteps)
    assert ranged.launch is not FollowingSteps.launch
    # An order to capture graphs is still the lead's alone.
    assert ranged.capture_graphs is FollowingSteps.capture_graphs


def test_the_cpu_kernels_have_a_name_for_each_step(folder, ranges) -> None:
    before = answer(steps_of(folder, attention_backend="cpu"))
    assert answer(steps_of(folder, attention_backend="cpu", enable_nvtx=True)) == before
    assert ranges[-2:] == ["step 1: 1 entries, 1 tokens"] * 2


def test_a_profile_shows_the_names(folder, tmp_path) -> None:
    steps = steps_of(folder, enable_nvtx=True)
    rank = RankProfiler(tmp_path, 0, "cpu", steps)
    (tmp_path / "a").mkdir()
    rank.start(StartProfile("a", ["CPU"], with_stack=False, record_shapes=False))
    answer(steps, 1)
    rank.stop()
    events = json.loads(gzip.decompress(rank.path("a").read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event.get("ph") == "X"}
    assert {"step 1: 1 entries, 3 tokens", "prepare", "forward", "layer 2", "sample", "copy", "wait"} <= names


def test_nvtx_ranges_close_whatever_happens_within(monkeypatch) -> None:
    calls: list[str] = []
    nvtx = SimpleNamespace(range_push=calls.append, range_pop=lambda: calls.append("pop"))
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)

    def fail() -> None:
        with step_ranges.make_range("a", torch.device("cuda")):
            with step_ranges.make_range("b", torch.device("cuda")):
                pass
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        fail()
    assert calls == ["a", "b", "pop", "pop"]
