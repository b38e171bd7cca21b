"""The CPU engine on several tensor-parallel ranks, against itself on one: threads of this process, and processes.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.machine import limit
from torch import Tensor

from pdserve.model_files.sharding import Shard, Slice, shard
from pdserve.model_files.spec import AttentionSpec, ModelSpec, QKNorm
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.native_engine import Ranks
from pdserve.model_runner.cpu_engine.ranks import PATIENCE_SECONDS, Exchange, ExchangeRoom, NativeRanks
from pdserve.model_runner.cpu_engine.weight_packer import LinearKind
from pdserve.model_runner.kv.pool import MHATokenToKVPool
from pdserve.model_runner.kv.quantization import LARGEST
from pdserve.runtime.ranks import RankPlace
from tests.unit.model_runner.test_kernels_layers import PASSES, SPECS, Engine, LayerTensors, Model, make_model

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

TOKENS = 512
SUMS_APART = 4e-5
"""Largest difference of float32 logits if sums are made in another order. Builds for the sanitizers reach 2.3e-5, since
the compiler fuses other multiplications with additions there."""


def divisible(spec: ModelSpec, heads: int = 8, kv_heads: int = 4) -> ModelSpec:
    """Return the spec with sizes that four ranks can share."""
    layers = tuple(
        replace(
            layer,
            attention=replace(layer.attention, heads=heads, kv_heads=kv_heads),
            mlp=replace(layer.mlp, inner=-(-layer.mlp.inner // 8) * 8),
        )
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def can_be_shared(spec: ModelSpec) -> bool:
    return all(layer.attention.qk_norm is not QKNorm.ALL for layer in spec.layers)


SHARED = {name: divisible(spec) for name, spec in SPECS.items() if can_be_shared(spec)}


def taken(whole: Tensor, part: Slice | None) -> Tensor:
    return whole if part is None else whole.narrow(part.axis, part.begin, part.size).contiguous()


def part_of(model: Model, own: Shard) -> Model:
    """Return the part of the model that a loader would give this rank."""

    def stacked(layer: int, kind: LinearKind, names: tuple[str, ...], sizes: list[int]) -> tuple[Tensor, Tensor | None]:
        weight, bias = model.layers[layer].linears[kind]
        weights = [
            taken(part, own.slice_of(f"layers.{layer}.{name}.weight"))
            for name, part in zip(names, weight.split(sizes), strict=True)
        ]
        if bias is None:
            return torch.cat(weights), None
        biases = []
        for name, part in zip(names, bias.split(sizes), strict=True):
            found = own.slice_of(f"layers.{layer}.{name}.bias")
            lost = found is not None and not found.size
            biases.append(torch.zeros_like(part) if lost else taken(part, found))
        return torch.cat(weights), torch.cat(biases)

    def of_layer(i: int) -> LayerTensors:
        attention: AttentionSpec = model.spec.layers[i].attention
        q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        hidden, inner = model.spec.hidden_size, model.spec.layers[i].mlp.inner
        linears = {
            LinearKind.QKV: stacked(i, LinearKind.QKV, ("q_proj", "k_proj", "v_proj"), [q, kv, kv]),
            LinearKind.O: stacked(i, LinearKind.O, ("o_proj",), [hidden]),
            LinearKind.GATE_UP: stacked(i, LinearKind.GATE_UP, ("gate_proj", "up_proj"), [inner, inner]),
            LinearKind.DOWN: stacked(i, LinearKind.DOWN, ("down_proj",), [hidden]),
        }
        heads = own.slice_of(f"layers.{i}.q_proj.weight")
        sinks = model.layers[i].sinks
        if sinks is not None and heads is not None:
            sinks = sinks[heads.begin // attention.head_dim : heads.end // attention.head_dim]
        return LayerTensors(linears, model.layers[i].norms, sinks)

    layers = [of_layer(i) for i in range(model.spec.num_layers)]
    return Model(own.spec, model.embedding, layers, model.final_norm)


def room(spec: ModelSpec) -> ExchangeRoom:
    return ExchangeRoom(TOKENS, spec.hidden_size, spec.vocab_size)


def of_heads(whole: MHATokenToKVPool, own: Shard) -> MHATokenToKVPool:
    """Return a rank's view of the same memory."""
    memory = whole.data.view(torch.uint8).numpy()
    return MHATokenToKVPool(whole.layout, len(whole.data), whole.data.device, memory, own.kv_heads())


def make_ranks(model: Model, size: int, threads: int = 1, kv_dtype: torch.dtype | None = None) -> list[Engine]:
    spec = model.spec
    shards = [shard(spec, rank, size) for rank in range(size)]
    first = NativeRanks(RankPlace(0, size), room(spec))
    groups = [first, *(NativeRanks(RankPlace(rank, size), room(spec), os.dup(first.fd)) for rank in range(1, size))]
    whole = Engine.make_pool(spec, kv_dtype or model.embedding.dtype)
    return [
        Engine(part_of(model, own), threads, pool=of_heads(whole, own), ranks=Ranks(own, group))
        for own, group in zip(shards, groups, strict=True)
    ]


def run_all(ranks: list[Engine], entries: list[tuple[int, int, int]]) -> dict[tuple[int, int], Tensor]:
    """Run all ranks, and return the logits of rank 0, which every other one has as well."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        results = list(threads.map(lambda engine: engine.run(entries), ranks))
    for result in results[1:]:
        assert all(torch.equal(result[place], logits) for place, logits in results[0].items())
    return results[0]


def assert_same(found: dict[tuple[int, int], Tensor], expected: dict[tuple[int, int], Tensor], off: float) -> None:
    for place, logits in expected.items():
        torch.testing.assert_close(found[place], logits, atol=off, rtol=off)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("size", "threads"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_compute_what_one_computes(name: str, size: int, threads: int) -> None:
    model = make_model(SHARED[name], torch.float32)
    alone, ranks = Engine(model, 1), make_ranks(model, size, threads)
    for entries in PASSES:
        assert_same(run_all(ranks, entries), alone.run(entries), SUMS_APART)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 1, 2), (8, 2, 4), (6, 2, 2)])
def test_fewer_kv_heads_than_ranks(heads: int, kv_heads: int, size: int) -> None:
    model = make_model(divisible(SPECS["plain"], heads, kv_heads), torch.float32)
    alone, ranks = Engine(model, 1), make_ranks(model, size)
    for entries in PASSES:
        assert_same(run_all(ranks, entries), alone.run(entries), SUMS_APART)


@pytest.mark.parametrize("kv_dtype", LARGEST)
@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 4)])
def test_ranks_share_pools_of_bytes(kv_dtype: torch.dtype, kv_heads: int, size: int) -> None:
    """Each writes its heads' elements and scales, and nothing else: the pools are the same but for sums' rounding."""
    model = make_model(divisible(SPECS["plain"], 8, kv_heads), torch.float32)
    alone = Engine(model, 1, pool=Engine.make_pool(model.spec, kv_dtype))
    ranks = make_ranks(model, size, kv_dtype=kv_dtype)
    for entries in PASSES:
        # A key that is rounded to the other side moves the logits by more than sums do.
        found, expected = run_all(ranks, entries), alone.run(entries)
        errors = torch.stack([(found[place] - expected[place]).abs().max() for place in expected])
        assert errors.median() < 1e-3
        assert errors.max() < 0.05


def test_bfloat16_differs_by_rounding_alone() -> None:
    model = make_model(SHARED["plain"], torch.bfloat16)
    alone, ranks = Engine(model, 1), make_ranks(model, 2)
    for entries in PASSES:
        assert_same(run_all(ranks, entries), alone.run(entries), 6e-2)


def test_a_pass_is_the_same_bits_each_time() -> None:
    model = make_model(SHARED["norms on both sides"], torch.float32)
    runs = [[run_all(ranks, entries) for entries in PASSES] for ranks in (make_ranks(model, 4) for _ in range(3))]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert all(torch.equal(one[place], two[place]) for place in one)


class Cable:
    """Connection between two hosts with leads that are threads of this process, as gloo would connect them."""

    def __init__(self) -> None:
        self.groups: list[NativeRanks] = []
        self.carried: set[Exchange] = set()
        self._both = threading.Barrier(2)

    def carry(self, memory: NativeRanks, what: Exchange, exchange: int, count: int) -> None:
        """Exchange the data in the lead that comes last, when both have written."""
        self.carried.add(what)
        if self._both.wait() == 0:
            first, second = self.groups
            if what is Exchange.PARTS:
                one, two = first.parts(exchange, count), second.parts(exchange, count)
                one[2:], two[:2] = two[2:], one[:2]
            else:
                half = first.room.vocab // 2
                one, two = first.logits(count, exchange), second.logits(count, exchange)
                one[:, half:], two[:, :half] = two[:, half:], one[:, :half]
        self._both.wait()


@pytest.mark.parametrize("name", ["plain", "norms on both sides"])
def test_ranks_of_two_hosts_give_the_bits_of_one(name: str) -> None:
    model, cable = make_model(SHARED[name], torch.float32), Cable()
    spec = model.spec
    engines = []
    for rank in range(4):
        place = RankPlace(rank, 4, nodes=2)
        fd = os.dup(cable.groups[-1].fd) if place.local else None
        group = NativeRanks(place, room(spec), fd, None if place.local else cable.carry)
        if not place.local:
            cable.groups.append(group)
            whole = Engine.make_pool(spec, torch.float32)
        own = shard(spec, rank, 4)
        engines.append(Engine(part_of(model, own), 1, pool=of_heads(whole, own), ranks=Ranks(own, group)))
    together = make_ranks(model, 4)
    for entries in PASSES:
        found, expected = run_all(engines, entries), run_all(together, entries)
        assert all(torch.equal(found[place], logits) for place, logits in expected.items())
    assert cable.carried == {Exchange.PARTS, Exchange.LOGITS}


def test_a_pass_that_is_too_long_is_refused() -> None:
    ranks = make_ranks(make_model(SHARED["plain"], torch.float32), 2)
    with pytest.raises(MemoryError, match="room for 512"):
        ranks[0].run([(0, 0, 300), (1, 0, 300)])


def test_logits_of_a_long_prompt_leave_no_memory_behind() -> None:
    """They are exchanged in slices: of 400 rows of this vocabulary, all at once, 8 MiB would stay."""
    model = make_model(replace(SHARED["plain"], vocab_size=5000), torch.float32)
    alone, ranks = Engine(model, 1), make_ranks(model, 2)
    for entries in ([(0, 0, 400)], [(0, 400, 1), (1, 0, 95)], [(1, 95, 97)]):
        assert_same(run_all(ranks, entries), alone.run(entries), SUMS_APART)
    group = ranks[0].ranks.group
    assert group.fd is not None
    parts, slices = 2 * 2 * TOKENS * 96 * 4, 2 * 96 * 5000 * 4
    assert os.fstat(group.fd).st_blocks * 512 < parts + slices + (1 << 16)


DIES = """
import os
from pdserve.model_runner.cpu_engine.ranks import ExchangeRoom, NativeRanks
from pdserve.runtime.ranks import RankPlace
NativeRanks(RankPlace(1, 2), ExchangeRoom(*{room}), {fd})
os._exit(3)
"""
WAITS = """
import sys
sys.path[:0] = {path!r}
from tests.unit.model_runner.test_kernels_ranks import wait_as_rank_0
wait_as_rank_0({fd})
"""


def test_a_rank_that_dies_in_a_pass_ends_the_others() -> None:
    """Rank 0 waits in the engine, where no exception reaches it. It names the missing rank, and ends."""
    group = NativeRanks(RankPlace(0, 2), room(SHARED["plain"]))
    path = [str(Path(__file__).parents[3]), *sys.path]
    codes = (
        DIES.format(room=tuple(room(SHARED["plain"])), fd=group.fd),
        WAITS.format(path=path, fd=group.fd),
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[group.fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for code in codes
    ]
    try:
        (_, said), (_, says) = (process.communicate(timeout=limit(60)) for process in processes)
        assert [process.returncode for process in processes] == [3, 1], said + says
        assert "tensor-parallel rank 1 of this host has ended in the middle of a pass" in says
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def test_a_rank_that_never_comes_is_not_waited_for_for_ever() -> None:
    """It has not ended, as far as rank 0 can tell."""
    group = NativeRanks(RankPlace(0, 2), room(SHARED["plain"]))
    code = WAITS.format(path=[str(Path(__file__).parents[3]), *sys.path], fd=f"{group.fd}, patience=2")
    done = subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=[group.fd],
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "hangs or was stopped: the others have waited for it for 2 s in the middle of a pass" in done.stderr


def wait_as_rank_0(fd: int, patience: int = PATIENCE_SECONDS) -> None:
    """Compute a pass that needs rank 1."""
    model = make_model(SHARED["plain"], torch.float32)
    own = shard(model.spec, 0, 2)
    group = NativeRanks(RankPlace(0, 2), room(model.spec), fd, patience=patience)
    pool = Engine.make_pool(model.spec, torch.float32)
    Engine(part_of(model, own), 1, pool=of_heads(pool, own), ranks=Ranks(own, group)).run(PASSES[0])


def test_ranks_are_processes(tmp_path: Path) -> None:
    """The proof that came first: rank 1 is another process, which maps what rank 0 has made."""
    model = make_model(SHARED["plain"], torch.float32)
    alone, spec = Engine(model, 1), model.spec
    group = NativeRanks(RankPlace(0, 2), room(spec))
    pool_file = tmp_path / "pool"
    nbytes = Engine.make_pool(spec, torch.float32).data.nbytes
    pool_file.write_bytes(bytes(nbytes))
    call = f"from tests.unit.model_runner.test_kernels_ranks import follow; follow({str(pool_file)!r}, {group.fd})"
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[3]), *sys.path]!r}; {call}"
    follower = subprocess.Popen([sys.executable, "-c", code], pass_fds=[group.fd], stdout=subprocess.PIPE)
    try:
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"ready\n"
        own = shard(spec, 0, 2)
        pool = Engine.make_pool(spec, torch.float32, pool_file)
        leader = Engine(part_of(model, own), 1, pool=of_heads(pool, own), ranks=Ranks(own, group))
        for entries in PASSES:
            assert_same(leader.run(entries), alone.run(entries), SUMS_APART)
        assert follower.wait(limit(20)) == 0
    finally:
        if follower.poll() is None:
            follower.send_signal(signal.SIGKILL)
        follower.wait()
        follower.stdout.close()


def follow(pool_file: str, fd: int) -> None:
    """Rank 1 of the test above."""
    model = make_model(SHARED["plain"], torch.float32)
    own = shard(model.spec, 1, 2)
    group = NativeRanks(RankPlace(1, 2), room(model.spec), fd)
    pool = Engine.make_pool(model.spec, torch.float32, Path(pool_file))
    engine = Engine(part_of(model, own), 1, pool=of_heads(pool, own), ranks=Ranks(own, group))
    print("ready", flush=True)
    for entries in PASSES:
        engine.run(entries)
