"""What a worker gives back is the system's, and what it takes again computes as before, to the last bit."""

from __future__ import annotations

import dataclasses
import gc
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.passes import pool_bytes
from support.recording_device import RecordingDevice
from support.tiny_model import CONFIG

from pdserve.mem_cache.kv_pages.region import RegionError
from pdserve.messages.base import pack_i32
from pdserve.messages.memory import MemoryUse, ReleaseMemory, ResumeMemory, TrimPool
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.worker import ForwardStep, RowInit, StepResult
from pdserve.model_files.errors import InvalidWeights
from pdserve.model_runner import memory_saver
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.memory_table import full_requests, memory_use, table
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import make_pool
from pdserve.model_runner.kv.pools import PoolPlan, Pools
from pdserve.model_runner.kv.prefault import PoolPrefault
from pdserve.model_runner.memory_saver import WorkerMemorySaver, unreleasable
from pdserve.model_runner.ranks.other_ranks import NoOtherRanks
from pdserve.model_runner.steps.step_runner import StepRunner
from pdserve.runtime.machine.memory import Memory, resident_bytes
from pdserve.server.options import ServerOptions

MIB, GIB = 2**20, 2**30
PAGE = 16
PROMPT = [(7 * i) % 90 + 3 for i in range(50)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def all_objects() -> None:
    """Collect what the product collects."""


@pytest.fixture(autouse=True)
def few_objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect the objects of this file alone, not those of all imported modules, which takes a second each time."""
    if "all_objects" not in request.fixturenames:
        monkeypatch.setattr(gc, "unfreeze", lambda: None)
        monkeypatch.setattr(memory_saver, "freeze", gc.collect)


class Rig:
    """A worker's parts. ``wide``: with some 60 MiB of weights, and as much KV; else as small as can be."""

    def __init__(self, folder: Path, *, wide: bool = False, **options: object) -> None:
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 8192}
        config = CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97}
        (folder / "config.json").write_text(json.dumps(config | (sizes if wide else {})))
        defaults = {"load_format": "dummy", "dtype": "float32", "max_total_tokens": 16384 if wide else 512}
        defaults |= {"max_running_requests": 2, "device": "cpu"}
        self.options = ServerOptions(model_path=str(folder), **(defaults | options))
        self.model = load_model(self.options)
        self.steps = StepRunner(self.model, 2)
        self.prefault = PoolPrefault.of(self.model.pools.region, self.model.pools.layout)
        self.occupation = WorkerMemorySaver(self.model, self.steps, self.prefault, NoOtherRanks())

    def answer(self, count: int = 6, first_page: int = 1) -> list[int]:
        """Generate greedily, with the prompt computed anew."""
        row = RowInit(0, len(PROMPT), SamplingParams(seed=0, temperature=0.0))
        slots = np.arange(len(PROMPT) + count) + first_page * PAGE
        step = self.step(PROMPT, 0, slots[: len(PROMPT)], [row])
        tokens = [int(np.frombuffer(self.steps.run(step).next_tokens, np.int32)[0])]
        for i in range(len(PROMPT), len(PROMPT) + count - 1):
            result: StepResult = self.steps.run(self.step([tokens[-1]], i, slots[i : i + 1], []))
            tokens.append(int(np.frombuffer(result.next_tokens, np.int32)[0]))
        return tokens

    def step(self, tokens: list[int], start: int, slots: np.ndarray, rows: list[RowInit]) -> ForwardStep:
        one, q_lens = pack_i32([1]), pack_i32([len(tokens)])
        loc = pack_i32(slots)
        return ForwardStep(1, pack_i32([0]), pack_i32([start]), q_lens, pack_i32([0]), one, pack_i32(tokens), loc, rows)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["kv_cache", "weights"]], ids="+".join)
def test_what_comes_back_answers_as_before(tmp_path: Path, backend: str, tags: list) -> None:
    rig = Rig(tmp_path, attention_backend=backend)
    before = rig.answer()
    kept = pool_bytes(rig.model.pools.pool).clone()
    changed = rig.occupation.obey(ReleaseMemory(tags))
    assert (changed.released, changed.error) == (tags, "")
    if len(tags) == 2:
        with pytest.raises(RuntimeError, match="weights are not there"):
            rig.answer()
    changed = rig.occupation.obey(ResumeMemory(tags))
    assert (changed.released, changed.error) == ([], "")
    # Weights alone leave the pool as it is: what is cached there goes on being right.
    assert torch.equal(pool_bytes(rig.model.pools.pool), kept) == ("kv_cache" not in tags)
    assert ("kv_cache" not in tags) or not rig.model.pools.pool.data.any()
    assert rig.answer(first_page=4) == before


@pytest.mark.sample(2)
@pytest.mark.usefixtures("all_objects")
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("transfer", ["tcp", "shm"])
def test_memory_goes_back_to_the_system(tmp_path: Path, backend: str, transfer: str) -> None:
    rig = Rig(tmp_path, wide=True, attention_backend=backend, disaggregation_transfer_backend=transfer)
    pool, weights = rig.model.pools.pool.nbytes, rig.model.weight_bytes
    assert min(pool, weights) > 48 * MIB
    rig.answer()
    assert rig.model.pools.region is not None
    assert (rig.model.pools.region.fd is not None) == (transfer == "shm")
    rig.model.pools.region.commit(0, rig.model.pools.region.nbytes)
    full = resident_bytes()
    changed = rig.occupation.obey(ReleaseMemory(["kv_cache"]))
    without_kv = resident_bytes()
    assert full - without_kv > 0.9 * pool
    assert changed.nbytes > 0.9 * pool
    assert rig.prefault.wait_ms == -1  # nothing is committed ahead of a use that is not near
    rig.occupation.obey(ReleaseMemory(["weights"]))
    assert without_kv - resident_bytes() > 0.9 * weights
    rig.occupation.obey(ResumeMemory(["kv_cache", "weights"]))
    assert rig.prefault.wait_ms >= 0
    # No more than at first, the packed copy of the weights included; the pool is taken as it is used.
    assert resident_bytes() < full - 0.9 * pool + 24 * MIB


def test_other_weights_than_before_are_refused_and_nothing_is_held(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    before = rig.answer()
    rig.occupation.obey(ReleaseMemory(["kv_cache", "weights"]))
    good = rig.model.engine._reload

    def missing() -> None:
        raise InvalidWeights("the checkpoint lacks 3 tensors")

    rig.model.engine._reload = missing
    changed = rig.occupation.obey(ResumeMemory(["kv_cache", "weights"]))
    assert (changed.released, changed.error) == (["kv_cache", "weights"], "the checkpoint lacks 3 tensors")
    changed = rig.occupation.obey(ResumeMemory(["kv_cache"]))
    assert (changed.released, changed.error) == (["weights"], "")
    # As if the weights of the start had been others.
    rig.model.engine._reload = partial(good.func, "another")
    changed = rig.occupation.obey(ResumeMemory(["weights"]))
    assert changed.released == ["weights"]
    assert "other weights than at the start" in changed.error
    rig.model.engine._reload = good
    assert rig.occupation.obey(ResumeMemory(["weights"])).error == ""
    assert rig.answer() == before


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_weights_without_steps_that_use_them_are_dropped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    rig = Rig(tmp_path, attention_backend=backend)
    before, use_weights = rig.answer(), rig.steps.use_weights
    rig.occupation.obey(ReleaseMemory(["kv_cache", "weights"]))

    def fail() -> None:
        monkeypatch.setattr(rig.steps, "use_weights", use_weights)
        raise MemoryError("no memory for steps")

    monkeypatch.setattr(rig.steps, "use_weights", fail)
    changed = rig.occupation.obey(ResumeMemory(["kv_cache", "weights"]))
    assert (changed.released, changed.error) == (["kv_cache", "weights"], "no memory for steps")
    with pytest.raises(RuntimeError, match="weights are not there"):
        rig.answer()
    changed = rig.occupation.obey(ResumeMemory(["kv_cache", "weights"]))
    assert (changed.released, changed.error) == ([], "")
    assert rig.answer() == before


def test_a_pool_that_the_system_does_not_take_back_is_named_and_the_weights_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So all ranks have released the same, and another resume begins where the first one did."""
    rig = Rig(tmp_path)
    before, region, good = rig.answer(), rig.model.pools.region, rig.model.engine._reload

    def refuse(begin: int = 0) -> None:
        raise RegionError("the system does not take the KV pool's memory back")

    def missing() -> None:
        raise InvalidWeights("the checkpoint lacks 3 tensors")

    monkeypatch.setattr(region, "give_back", refuse)
    changed = rig.occupation.obey(ReleaseMemory(["kv_cache", "weights"]))
    assert changed.released == ["kv_cache", "weights"]
    assert changed.error == "the system does not take the KV pool's memory back"
    rig.model.engine._reload = missing
    changed = rig.occupation.obey(ResumeMemory(["kv_cache", "weights"]))
    assert changed.released == ["kv_cache", "weights"]
    assert changed.error == "the checkpoint lacks 3 tensors; the system does not take the KV pool's memory back"
    rig.model.engine._reload = good
    changed = rig.occupation.obey(ResumeMemory(["kv_cache", "weights"]))
    assert (changed.released, changed.error) == ([], "")
    assert rig.answer() == before


def test_what_does_not_fit_is_refused_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.occupation.obey(ReleaseMemory(["kv_cache", "weights"]))
    both = rig.model.pools.pool.nbytes + rig.model.weight_bytes
    monkeypatch.setattr(rig.model.device, "memory", lambda: Memory(2 * both, both - 1))
    changed = rig.occupation.obey(ResumeMemory(["kv_cache", "weights"]))
    assert changed.released == ["kv_cache", "weights"]
    assert "are free; free memory and ask again" in changed.error
    assert rig.occupation.obey(ResumeMemory(["weights"])).error == ""


def test_a_pool_that_became_smaller_needs_no_more_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.occupation.trim(TrimPool(8))
    rig.occupation.obey(ReleaseMemory(["kv_cache"]))
    left = 8 * rig.model.pools.layout.groups[0].page_bytes
    monkeypatch.setattr(rig.model.device, "memory", lambda: Memory(GIB, left))
    assert left < rig.model.pools.pool.nbytes
    assert rig.occupation.obey(ResumeMemory(["kv_cache"])).error == ""


def test_pages_at_the_end_go_and_are_not_committed_again_ahead(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wide=True)
    before, region, page_bytes = rig.answer(), rig.model.pools.region, rig.model.pools.layout.groups[0].page_bytes
    assert region is not None
    region.commit(0, region.nbytes)
    full = resident_bytes()
    rig.occupation.trim(TrimPool(8))
    assert full - resident_bytes() > 0.9 * (region.nbytes - 8 * page_bytes)
    rig.prefault.used(7 * PAGE)
    while rig.prefault.wait_ms >= 0:
        rig.prefault.advance()
    assert rig.prefault.committed <= 8 * page_bytes
    assert rig.answer() == before
    # More again.
    rig.occupation.trim(TrimPool(region.nbytes // page_bytes))
    assert rig.answer(first_page=20) == before


def test_what_a_pool_may_grow_to_is_reserved_and_not_taken(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wide=True, max_total_tokens=512, max_total_tokens_limit=16384)
    model, page_bytes = rig.model, rig.model.pools.layout.groups[0].page_bytes
    assert (model.pools.max_total_tokens, model.pools.limit_tokens, model.pools.num_slots) == (512, 16384, 16384 + PAGE)
    assert memory_use(model, 0).kv_pool == 33 * page_bytes
    rig.occupation.trim(TrimPool(33))
    before = resident_bytes()
    while rig.prefault.wait_ms >= 0:
        rig.prefault.advance()
    assert rig.prefault.committed <= 33 * page_bytes
    assert resident_bytes() - before < 33 * page_bytes + 4 * MIB
    # As far as it may grow it can be used.
    answer = rig.answer()
    rig.occupation.trim(TrimPool(1025))
    assert rig.answer(first_page=1000) == answer


class Ranks:
    """The other ranks of a host."""

    numbers = (1,)

    def __init__(self, errors: list[str]) -> None:
        self.commands: list[object] = []
        self.errors = errors

    def tell(self, command: object) -> None:
        self.commands.append(command)

    def answers(self) -> list[str]:
        return self.errors if isinstance(self.commands[-1], ResumeMemory) else []


def test_ranks_have_all_of_it_or_none(tmp_path: Path) -> None:
    rig, captured = Rig(tmp_path), []
    ranks: Any = Ranks(["rank 1: no memory"])
    occupation = WorkerMemorySaver(rig.model, rig.steps, rig.prefault, ranks)
    before = rig.answer()
    rig.steps.capture_graphs = lambda: captured.append(len(ranks.commands))  # type: ignore[method-assign]
    occupation.obey(ReleaseMemory(["weights"]))
    changed = occupation.obey(ResumeMemory(["weights"]))
    assert (changed.released, changed.error) == (["weights"], "rank 1: no memory")
    assert ranks.commands == [ReleaseMemory(["weights"]), ResumeMemory(["weights"]), ReleaseMemory(["weights"])]
    assert captured == []
    ranks.errors = []
    assert occupation.obey(ResumeMemory(["weights"])).error == ""
    assert captured == [4]  # when all have said that they have it
    assert rig.answer() == before


def test_what_cannot_go_back_is_named(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert unreleasable(rig.model, rig.options) == []
    ranks = dataclasses.replace(rig.options, nnodes=2)
    assert {item.tag for item in unreleasable(rig.model, ranks)} == {"kv_cache", "weights"}


def test_an_accelerators_pool_goes_by_its_storage_and_graphs_are_captured_again() -> None:
    """Its views are those of before, at other addresses; what was captured at the old ones is forgotten first."""
    events: list[str] = []

    class Steps:
        def drop_graphs(self) -> None:
            events.append("dropped")

        def capture_graphs(self) -> None:
            events.append("captured")

    layout = make_layout(KVShape(2, 2, 8), PAGE, torch.float32)
    pool = make_pool(layout, 4, torch.device("cpu"))
    device = RecordingDevice()
    device.kind = "cuda"
    model: Any = SimpleNamespace(device=device, pools=Pools(layout, PoolPlan(4), [pool], [None]), weight_bytes=0)
    steps: Any = Steps()
    occupation = WorkerMemorySaver(model, steps, PoolPrefault(None, 1, device.memory), NoOtherRanks())
    rows = pool.token_rows(torch.tensor([PAGE, PAGE + 1]))
    pool.store(1, rows, torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    assert occupation.obey(ReleaseMemory(["kv_cache"])).released == ["kv_cache"]
    assert (pool.data.untyped_storage().nbytes(), events) == (0, ["dropped"])
    assert occupation.obey(ResumeMemory(["kv_cache"])).error == ""
    assert events == ["dropped", "captured"]
    assert not pool.data.any()
    pool.store(1, rows, torch.full((2, 2, 8), 3.0), torch.ones(2, 2, 8))
    assert pool.gather(1, torch.tensor([1]))[0][:2].eq(3).all()


def test_the_table_says_where_memory_is_and_how_many_requests_fit() -> None:
    layout = make_layout(KVShape(2, 2, 8), PAGE, torch.float32)
    use = MemoryUse(
        GIB, 2 * GIB, 0, GIB // 2, GIB // 4, 16 * GIB, 9 * GIB, 4096, 0, full_requests(layout, 1000, 4096, 0)
    )
    assert table(use, layout, 1000, "float32") == [
        "weights       1.00 GiB  float32",
        "KV pool       2.00 GiB  4096 tokens of 0.25 KiB, in pages of 16",
        "host tier     0.50 GiB  reserved, and taken as it is used",
        "rest          0.25 GiB  libraries, activations, tables",
        "free          9.00 GiB  of 16.00 GiB",
        "requests of the whole context (1000 tokens) at a time: 4.1",
    ]
    windowed = make_layout(KVShape(2, 2, 8), PAGE, torch.float32, windows={1: 100})
    # 4 requests by the pool that keeps all; each needs 8 pages behind its window.
    assert full_requests(windowed, 1024, 4096, 4096) == 4
    assert full_requests(windowed, 1024, 4096, 3 * 8 * PAGE) == 3
    assert any("windows" in line and "see 100" in line for line in table(use, windowed, 1024, "float32"))
