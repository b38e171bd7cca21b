"""Decode steps as graphs, on a device that records: the same answers as without, nothing waited for, nothing frozen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import make_reference
from support.recording_device import RecordingDevice
from support.static_attention import StaticAttention

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.readout import ReadoutKind, ReadoutSpec
from pdserve.messages.worker import InputLogprobSpec
from pdserve.model_runner.batch import scored_logits
from pdserve.model_runner.batch.scored_logits import ScoredLogits
from pdserve.model_runner.device.base import HostSync
from pdserve.model_runner.engines import load, load_torch
from pdserve.model_runner.engines import torch as torch_engine
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.errors import NotEnoughMemory
from pdserve.model_runner.loader import weight_loader
from pdserve.model_runner.ops.layers.expert_networks import ExpertNetworks
from pdserve.model_runner.ops.torch_ops import TorchOps
from pdserve.model_runner.page_mover import NoPageMover
from pdserve.model_runner.steps.decode_graphs import DecodeGraphs, graph_sizes, size_for
from pdserve.model_runner.steps.step_queue import StepQueue
from pdserve.model_runner.steps.step_runner import StepRunner
from pdserve.runtime import layers_done
from pdserve.runtime.layers_done import LayersDone
from pdserve.runtime.options import OptionError, check_options
from pdserve.server.options import ServerOptions
from tests.unit.model_runner.test_kernels_engine import VOCAB, save_model
from tests.unit.model_runner.test_native_steps import ROWS, make_model, make_row, make_step


def test_sizes_are_dense_where_steps_are_small() -> None:
    assert graph_sizes(6) == (1, 2, 4, 6)
    assert graph_sizes(64) == (1, 2, 4, *range(8, 65, 8))
    assert graph_sizes(1000)[-4:] == (208, 224, 240, 256)
    assert graph_sizes(1000, most=20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(10, given=[12, 3, 3, 1]) == (1, 3)
    assert [size_for((1, 2, 4, 8), count) for count in (1, 3, 8, 9)] == [1, 4, 8, None]


@pytest.mark.parametrize("sizes", ["1,x", "0,2", "-1"])
def test_sizes_that_are_none_are_refused(sizes: str) -> None:
    with pytest.raises(OptionError, match="--cuda-graph-bs"):
        check_options(ServerOptions(cuda_graph_bs=sizes))
    with pytest.raises(OptionError, match="--disable-cuda-graph"):
        check_options(ServerOptions(cuda_graph_bs="1", disable_cuda_graph=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def device() -> Iterator[RecordingDevice]:
    with RecordingDevice() as device:
        yield device


def recorded_model(folder: Path, device: RecordingDevice, monkeypatch, **options) -> LoadedModel:
    monkeypatch.setattr(load, "open_device", lambda *args, **more: device)
    monkeypatch.setattr(torch_engine, "make_attention_backend", lambda name, needs: StaticAttention(*needs[:2]))
    # The device has recorded nothing when the model is there.
    monkeypatch.setattr(load_torch, "measure_step_bytes", lambda *_args: 0)
    options = {"dtype": "float32", "attention_backend": "torch", "max_running_requests": ROWS} | options
    return make_model(folder, **options)


def plain_steps(folder: Path) -> StepRunner:
    return StepRunner(make_model(folder, dtype="float32", attention_backend="torch"), ROWS)


def random_steps(seed: int):
    """Yield steps of prompts, and of one to all rows that decode, with all kinds of sampling and log-probabilities."""
    rng, reads = random.Random(seed), random.Random(seed + 100)
    lens: dict[int, int] = {}
    for step_id in range(30):
        entries, new, specs, readouts = [], [], [], []
        for row in rng.sample(range(ROWS), rng.randint(1, ROWS)):
            if row in lens and (lens[row] < 40 or step_id % 3):
                piece = rng.random() < 0.15
                entries.append((row, lens[row], [rng.randrange(VOCAB)] if piece else None, not piece))
                lens[row] += 1
                continue
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            kinds = [
                {},
                {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
                {"temperature": 1.0, "top_k": 5, "logprobs": 2},
                {"temperature": 1.2, "frequency_penalty": 0.7, "history": pack_i32(prompt)},
                {"repetition_penalty": 1.4, "presence_penalty": 0.5, "history": pack_i32(prompt), "logprobs": 0},
                {"logit_bias": {3: 40.0}, "min_new_tokens": 4, "stop_ids": (3,)},
            ]
            kind = rng.choice(kinds)
            new.append(make_row(row, len(prompt), **kind))
            if len(prompt) > 2 and rng.random() < 0.3:
                specs.append(InputLogprobSpec(len(entries), 0, pack_i32(prompt[1:]), 1))
            if reads.random() < 0.4:
                # Labels are only asked of requests that edit no logits.
                wanted = reads.choice(("mean", "last", *(["labels"] if kind in kinds[:2] else [])))
                readouts.append(ReadoutSpec(len(entries), wanted, True, pack_i32(reads.sample(range(VOCAB), 3))))
            entries.append((row, 0, prompt, True))
            lens[row] = len(prompt)
        yield make_step(entries, new_rows=new, input_logprobs=specs, readouts=readouts)


def same(ours, theirs) -> None:
    assert unpack_i32(ours.next_tokens).tolist() == unpack_i32(theirs.next_tokens).tolist()
    assert (ours.logprobs is None) == (theirs.logprobs is None)
    for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    for listed, others in zip(ours.input_logprobs, theirs.input_logprobs, strict=True):
        assert [one.token_id for one in listed] == [other.token_id for other in others]
        assert [one.logprob for one in listed] == pytest.approx([other.logprob for other in others], abs=1e-4)
    for vector, other in zip(ours.readouts, theirs.readouts, strict=True):
        assert np.frombuffer(vector, "<f4") == pytest.approx(np.frombuffer(other, "<f4"), abs=1e-4)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2))])
def test_graphs_answer_as_single_kernels_do_and_nothing_waits(folder, device, monkeypatch, seed: int) -> None:
    steps, plain = (
        StepRunner(recorded_model(folder, device, monkeypatch, cuda_graph_bs="1,3"), ROWS),
        plain_steps(folder),
    )
    steps.capture_graphs()
    assert [line for line in device.log if "capture" in line] == ["capture 0", "capture 1"]
    queue, expected, sizes = StepQueue(steps, NoPageMover(), ahead=1), [], []
    for step in random_steps(seed):
        before = len(device.log)
        queue.launch(step)
        sizes += [len(unpack_i32(step.rows)) for line in device.log[before:] if line.startswith("replay")]
        expected.append(plain.run(step))
        if queue.is_full:
            same(queue.collect(), expected.pop(0))
    same(queue.collect(), expected.pop(0))
    assert set(sizes) == {1, 2, 3}
    # Counts go back with their requests.
    assert all(steps.executor.rows.table["penalised"][row] for row in steps.executor.sampler._penalties._places)
    assert len(steps.executor.sampler._penalties.counts) <= 8  # of six rows


@pytest.mark.parametrize("rows", [3, 8])
def test_prompts_are_scored_in_pieces_as_they_are_at_once(folder, device, monkeypatch, rows: int) -> None:
    steps, plain = StepRunner(recorded_model(folder, device, monkeypatch), ROWS), plain_steps(folder)
    monkeypatch.setattr(scored_logits, "ROWS", rows)
    computed: list[int] = []
    pieces = ScoredLogits.pieces

    def noted(scored: ScoredLogits, begin: int, end: int) -> Iterator[torch.Tensor]:
        for piece in pieces(scored, begin, end):
            computed.append(len(piece))
            yield piece

    monkeypatch.setattr(ScoredLogits, "pieces", noted)
    for step in random_steps(1):
        same(steps.run(step), plain.run(step))
    assert max(computed) == rows
    assert steps.executor._scored is None


@pytest.mark.parametrize(("kind", "replays"), [("last", 0), ("mean", 0), ("labels", 1)])
def test_a_graph_gives_no_hidden_states_so_none_is_replayed_for_them(
    folder, device, monkeypatch, kind: ReadoutKind, replays: int
) -> None:
    steps, plain = StepRunner(recorded_model(folder, device, monkeypatch), ROWS), plain_steps(folder)
    steps.capture_graphs()
    readouts = [ReadoutSpec(1, kind, True, pack_i32([5, 9]))]
    new = [make_row(row, 1) for row in range(2)]
    step = make_step([(row, 0, [row + 3], True) for row in range(2)], new_rows=new, readouts=readouts)
    same(steps.run(step), plain.run(step))
    assert len([line for line in device.log if line.startswith("replay")]) == replays


def test_the_largest_is_captured_first_and_the_smallest_that_fits_is_replayed(folder, device, monkeypatch) -> None:
    model = recorded_model(folder, device, monkeypatch)
    assert model.engine.graph_sizes == (1, 2, 4, 6)
    computed = []
    compute = model.engine.compute
    monkeypatch.setattr(model.engine, "compute", lambda batch: computed.append(len(batch.q_lens)) or compute(batch))
    steps = StepRunner(model, ROWS)
    steps.capture_graphs()
    assert computed == [6, 6, 4, 4, 2, 2, 1, 1]  # once to warm up, once recorded
    steps.run(make_step([(row, 0, [row], True) for row in range(3)], new_rows=[make_row(row, 1) for row in range(3)]))
    steps.run(make_step([(0, 1, [5, 6], True)]))
    assert [line for line in device.log if "replay" in line] == ["replay 1"]  # of 4
    assert computed[8:] == [1]


def test_all_graphs_leave_their_logits_in_one_place(folder, device, monkeypatch) -> None:
    steps = StepRunner(recorded_model(folder, device, monkeypatch), ROWS)
    steps.capture_graphs()
    outputs = [captured.graph.output for captured in steps.executor.graphs._graphs.values()]
    assert sorted(map(len, outputs)) == [1, 2, 4, 6]
    assert len({output.data_ptr() for output in outputs}) == 1
    steps.drop_graphs()
    assert steps.executor.graphs._logits is None


def test_layers_of_a_prompt_are_there_as_their_events_come_and_not_before(folder, device, monkeypatch) -> None:
    monkeypatch.setattr(layers_done, "MARKED_LAYERS", 1)
    steps, done = StepRunner(recorded_model(folder, device, monkeypatch), ROWS), LayersDone()
    launched = steps.launch(make_step([(0, 0, [3, 4, 5], True)], new_rows=[make_row(0, 3)]), done)
    layers = len(device.marks)
    assert layers == len(steps._model.pools.layout.groups[0].layers) > 1
    assert done.count == 0
    device.marks[1] = True  # they come in order: what is seen of the second means nothing before the first is
    assert done.count == 0
    device.marks[0] = True
    assert done.count == 2
    device.marks[:] = [True] * layers
    assert done.count == layers
    steps.collect(launched)


def test_few_layers_are_marked_and_the_end_is_the_end_of_all(folder, device, monkeypatch) -> None:
    done = LayersDone()
    done.mark = device.mark
    for count in range(1, 11):
        done.launched(count)
    assert len(device.marks) == 10 // layers_done.MARKED_LAYERS == 2
    done.finish()
    assert done.count == layers_done.ALL
    device.marks[0] = True
    assert done.count == layers_done.ALL


def test_padding_writes_where_no_request_reads(folder, device, monkeypatch) -> None:
    model = recorded_model(folder, device, monkeypatch, cuda_graph_bs="6")
    steps = StepRunner(model, ROWS)
    steps.capture_graphs()
    steps.run(make_step([(1, 0, [7, 8, 9], True)], new_rows=[make_row(1, 3)]))
    before = model.pools.pool.data.clone()
    steps.run(make_step([(1, 3, None, True)]))
    changed = (model.pools.pool.data != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed in ([2], [0, 2])


def test_without_graphs_there_are_none(folder, device, monkeypatch) -> None:
    assert recorded_model(folder, device, monkeypatch, disable_cuda_graph=True).engine.graph_sizes == ()
    monkeypatch.setattr(StaticAttention, "is_graph_safe", False)
    assert recorded_model(folder, device, monkeypatch).engine.graph_sizes == ()


class StaticExperts(TorchOps):
    """Every token through every expert, those of no choice by a weight of nought: nothing is asked of the choice."""

    def run_experts(self, x_TN, networks: ExpertNetworks, experts_TC, weights_TC) -> torch.Tensor:
        shares_TE = torch.zeros(len(x_TN), networks.spec.count).scatter_(1, experts_TC, weights_TC)
        outs = [networks.forward(e, x_TN) * shares_TE[:, e, None] for e in range(networks.spec.count)]
        return torch.stack(outs).sum(0)

    def waits_for_experts(self, networks: ExpertNetworks) -> str | None:
        return None


@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral"])
def test_models_with_experts_are_graphs_if_the_host_does_not_read_the_choice(
    tmp_path, device, monkeypatch, name
) -> None:
    make_reference(name).save_pretrained(tmp_path)
    monkeypatch.setattr(weight_loader, "choose_ops", lambda device: StaticExperts())
    steps = StepRunner(recorded_model(tmp_path, device, monkeypatch, cuda_graph_bs="1,3"), ROWS)
    plain = plain_steps(tmp_path)
    steps.capture_graphs()
    rows = range(3)
    prompts = make_step([(row, 0, [row, 9, 4], True) for row in rows], new_rows=[make_row(row, 3) for row in rows])
    for step in (prompts, *(make_step([(row, at, None, True) for row in rows]) for at in range(3, 8))):
        same(steps.run(step), plain.run(step))
    assert sum(line == "replay 0" for line in device.log) == 5


def test_models_with_experts_that_are_looked_through_on_the_host_have_no_graphs(
    tmp_path, device, monkeypatch, caplog
) -> None:
    make_reference("qwen3-moe").save_pretrained(tmp_path)
    caplog.set_level("INFO")
    model = recorded_model(tmp_path, device, monkeypatch)
    assert model.engine.graph_sizes == ()
    assert "without CUDA graphs: without Triton's kernels, experts are looked through on the host" in caplog.text


class HalfFrozen:
    """A model that looks at the host while it is captured."""

    def __init__(self) -> None:
        self.reads = False
        self.seen = torch.zeros(3)

    def prepare(self, batch) -> None:
        pass

    def compute(self, batch) -> torch.Tensor:
        if self.reads:
            self.seen.sum().item()
        return self.seen * batch.starts[0]


class Batch:
    q_lens = (1,)
    starts = (2,)


def test_what_a_graph_reads_of_the_host_is_frozen_and_a_wait_is_an_error(device) -> None:
    model = HalfFrozen()
    graphs = DecodeGraphs(device, model, (1,))
    assert graphs.size_for(1) is None
    graphs.capture(lambda size: Batch())
    model.seen += 1
    batch = Batch()
    batch.starts = (5,)
    assert graphs.run(batch).tolist() == [2.0] * 3  # the 2 of its capture, the ones of now
    model.reads = True
    with pytest.raises(HostSync, match="item"):
        graphs.capture(lambda size: Batch())
    graphs.drop()
    assert graphs.size_for(1) is None


def test_a_graph_that_does_not_fit_says_what_to_lower(folder: Path, device: RecordingDevice, monkeypatch) -> None:
    steps = StepRunner(recorded_model(folder, device, monkeypatch, cuda_graph_bs="1,2"), ROWS)
    capture, sizes = device.capture, []

    def full(run):
        if sizes:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        sizes.append(2)
        return capture(run)

    monkeypatch.setattr(device, "capture", full)
    with pytest.raises(
        NotEnoughMemory, match=r"CUDA graph of 1 decodes .* lower --cuda-graph-max-bs.*\(tried to alloc"
    ):
        steps.capture_graphs()
    assert steps.executor.graphs.size_for(2) is None
