"""Files of packed weights: their names, what they hold, and the memory that they take."""

from __future__ import annotations

import dataclasses
import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_model import CONFIG
from support.weights_rig import Rig

from pdserve.model_runner.cpu_engine import packed_model, weight_memory
from pdserve.model_runner.cpu_engine.build import BuildError, choose_level
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.packed_model import (
    BODY,
    HEADER,
    Contents,
    DamagedWeights,
    PackedModel,
    PackedModelWriter,
)
from pdserve.model_runner.cpu_engine.weight_memory import CHUNK, check_room, make_memory, map_file, take_memory
from pdserve.model_runner.device.cpu import CpuDevice
from pdserve.model_runner.loader.host_weights import HostLoader
from pdserve.model_runner.weights_cache.cache import PrivateWeights
from pdserve.model_runner.weights_cache.local_builder import LocalBuilder
from pdserve.model_runner.weights_cache.model_packer import ModelPacker
from pdserve.model_runner.weights_cache.request import PackOrder
from pdserve.runtime.machine.memory import Memory

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


CHANGES: dict[str, dict[str, Any]] = {
    "type": {"dtype": "bfloat16"},
    "quantisation": {"quantization": "int8"},
    "activations": {"quantized_activations": "int8"},
    "seed": {"random_seed": 1},
    "context": {"context_length": 64},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_weights_depend_on_is_in_the_name(rig: Rig, change: dict[str, Any]) -> None:
    name, other = rig.request().name(), rig.request(**change).name()
    assert name == rig.request().name()
    assert name.variant != other.variant
    assert (name.model, name.source) == (other.model, other.source)


def test_pool_part_and_node_are_in_the_name(rig: Rig) -> None:
    request = rig.request()
    names = {
        dataclasses.replace(request, **change).name().variant
        for change in ({}, {"kv_dtype": "bfloat16"}, {"node": 0}, {"node": 1})
    }
    order = PackOrder(dataclasses.asdict(rig.options()), "float32", "float32", None, 0, 2, 1, 0, 0)
    ranks = {dataclasses.replace(order.read(), shard=None).name().variant}
    ranks |= {msgspec_replace(order, rank=rank).read().name().variant for rank in range(2)}
    assert len(names) == 4
    assert len(ranks) == 3


def msgspec_replace(order: PackOrder, **changes: Any) -> PackOrder:
    return PackOrder(**({name: getattr(order, name) for name in order.__struct_fields__} | changes))


def test_the_code_and_the_level_are_in_the_name(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.model_runner.weights_cache import request

    name = rig.request().name()
    assert choose_level().name in request.library_path(choose_level()).name
    monkeypatch.setattr(request, "code_digest", lambda: "other code")
    assert rig.request().name().variant != name.variant
    monkeypatch.undo()
    monkeypatch.setattr(request, "library_path", lambda level: Path("other-kernels.so"))
    assert rig.request().name().variant != name.variant


def test_a_file_that_was_written_again_is_another_source(rig: Rig) -> None:
    name = rig.request().name()
    config = (rig.model / "config.json").read_bytes()
    (rig.model / "new.json").write_bytes(config)
    os.replace(rig.model / "new.json", rig.model / "config.json")
    other = rig.request().name()
    assert (other.model, other.variant) == (name.model, name.variant)
    assert other.source != name.source


def test_weights_that_the_kernel_may_drop_leave_the_pool_less_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel counts the page cache as free, and a pool that took it would push the weights out."""
    caplog.set_level(logging.INFO)
    options = {"max_total_tokens": None, "mem_fraction_static": 1.0, "max_running_requests": 100_000}
    free = 64 << 20
    monkeypatch.setattr(CpuDevice, "memory", lambda device: Memory(4 * free, free))
    pools = {}
    for is_locked in (True, False):
        monkeypatch.setattr(weight_memory, "lock_memory", lambda address, nbytes, answer=is_locked: answer)
        model = rig.load(**options)
        pools[is_locked] = model.pools.plan.num_pages * model.pools.layout.page_bytes
        assert ("ulimit -l" in caplog.text) == (not is_locked)
    assert 0.85 * model.weight_bytes < pools[True] - pools[False] < 0.95 * model.weight_bytes
    asked = rig.request()
    assert rig.source.open(asked).memory == (model.weight_bytes, model.weight_bytes)
    assert PrivateWeights(LocalBuilder()).open(asked).memory == (model.weight_bytes, 0)


def test_pages_are_locked_if_the_system_allows_it(rig: Rig) -> None:
    packed = rig.source.open(rig.request())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    locked = int(status["VmLck"].split()[0]) * 1024
    assert (packed.memory.page_cache == 0) == (locked >= packed.memory.total)


def test_private_weights_can_not_be_written_and_leave_no_second_copy(rig: Rig) -> None:
    fds = set(os.listdir("/proc/self/fd"))
    packed = PrivateWeights(LocalBuilder()).open(rig.request())
    assert set(os.listdir("/proc/self/fd")) == fds
    begin = f"{packed.address(0):x}-"
    (mapped,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(begin))
    assert mapped.split()[1] == "r--p"


def test_memory_moves_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "CHUNK", 1 << 16)
    data = np.random.default_rng(0).integers(0, 256, 1_000_003, dtype=np.uint8)
    fd = make_memory()
    os.pwrite(fd, data.tobytes(), 0)
    taken = take_memory(fd)
    assert np.array_equal(taken.data, data)
    assert taken.page_cache == 0
    assert os.fstat(fd).st_blocks * 512 <= mmap.PAGESIZE
    os.close(fd)


def test_a_file_is_written_in_whole_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_model, "CHUNK", 1 << 16)
    writes: list[tuple[int, int]] = []
    real = os.pwrite

    def pwrite(fd: int, data: Any, place: int) -> int:
        writes.append((place, len(data)))
        return real(fd, data[: 1 << 15], place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    arrays = [np.full(count, i, dtype=np.uint8) for i, count in enumerate((10, 1 << 17, 70_000, 0))]
    with (tmp_path / "file").open("w+b") as opened:
        writer = PackedModelWriter(opened.fileno())
        places = [writer.add(array) for array in arrays]
        writer.finish(Contents("key", "/model", "f", "none", None, 1, [], [], [], BODY, [], 0))
        packed = PackedModel(map_file(opened.fileno()), "key")
    for place, array in zip(places, arrays, strict=True):
        assert place % 64 == 0
        assert np.array_equal(packed._mapped.data[place : place + len(array)], array)
    assert all(place % (1 << 15) == 0 for place, _ in writes)
    assert writes[-1] == (0, HEADER.size)


def test_each_layer_is_given_back_when_it_is_packed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else start-up would take twice the weights."""
    held: list[int] = []
    loaded: list[Any] = []
    real_load, real_pack = HostLoader.load, ModelPacker._pack_layer

    def load(self: HostLoader) -> Any:
        loaded.append(real_load(self))
        return loaded[-1]

    def pack_layer(self: ModelPacker, i: int, layer: Any) -> None:
        real_pack(self, i, layer)
        linears = [
            linear
            for each in loaded[0].model.layers
            for linear in (each.attention.qkv_proj, each.attention.o_proj, each.mlp.gate_up_proj, each.mlp.down_proj)
        ]
        held.append(sum(linear.weight.nbytes for linear in linears))
        assert all(linear.weight.base is None for linear in linears)

    monkeypatch.setattr(HostLoader, "load", load)
    monkeypatch.setattr(ModelPacker, "_pack_layer", pack_layer)
    rig.load()
    layers = CONFIG["num_hidden_layers"]
    one = held[0] // (layers - 1)
    assert held == [one * (layers - 1 - i) for i in range(layers)]


def test_a_file_that_is_not_finished_has_no_header(tmp_path: Path) -> None:
    file = tmp_path / "part"
    with file.open("w+b") as opened:
        writer = PackedModelWriter(opened.fileno())
        assert [writer.add(np.arange(10, dtype=np.float32)) for _ in range(2)] == [BODY, BODY + 64]
        opened.write(bytes(BODY))
        opened.flush()
        with pytest.raises(DamagedWeights, match="header"):
            PackedModel(map_file(opened.fileno()), "key")
        writer.finish(Contents("key", "/model", "f", "none", None, 1, [], [], [], BODY, [], 0))
        assert PackedModel(map_file(opened.fileno()), "key").contents.embedding == BODY
        with pytest.raises(DamagedWeights, match="another model"):
            PackedModel(map_file(opened.fileno()), "other")


def test_the_writer_names_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full, pytest.raises(OSError, match="No space left"):
        PackedModelWriter(full.fileno()).add(np.zeros(CHUNK))


def test_room_is_looked_for_before_anything_is_loaded(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    with pytest.raises(OSError, match="MiB of the disk are free") as caught:
        check_room(tmp_path, 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    fd = make_memory()
    check_room(fd, 1 << 60)
    os.close(fd)
