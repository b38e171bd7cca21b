"""Packed weights that instances share: one copy, right or built again, whatever happens to the file or to a builder."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.machine import limit
from support.tiny_model import CONFIG

from pdserve.model_files.errors import InvalidWeights
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import BuildError, choose_level
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.packed_model import (
    BODY,
    HEADER,
    Contents,
    DamagedWeights,
    PackedModel,
    PackedModelWriter,
    check_room,
    make_memory,
    seal_memory,
)
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.loader.weight_loader import WeightLoader
from pdserve.model_runner.weights_cache import build_process, cache
from pdserve.model_runner.weights_cache.build_process import BuilderProcess
from pdserve.model_runner.weights_cache.cache import UNUSED_SECONDS, CachedWeights, PrivateWeights, weights_folder
from pdserve.model_runner.weights_cache.local_builder import LocalBuilder
from pdserve.model_runner.weights_cache.model_packer import ModelPacker
from pdserve.model_runner.weights_cache.request import PackOrder, PackRequest
from pdserve.runtime import trusted_path
from pdserve.server.options import ServerOptions

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

VOCAB = 97
TOKENS = [(7 * i) % VOCAB for i in range(40)]

pytestmark = pytest.mark.usefixtures("one_thread")


class Builds:
    """Packs models here, and counts them."""

    def __init__(self) -> None:
        self.requests: list[PackRequest] = []
        self.before: Callable[[int], None] = lambda fd: None

    def build(self, request: PackRequest, fd: int) -> None:
        self.requests.append(request)
        self.before(fd)
        LocalBuilder().build(request, fd)


class Rig:
    """A folder of packed weights and a model."""

    def __init__(self, tmp_path: Path) -> None:
        self.model = tmp_path / "model"
        self.model.mkdir()
        self.config(vocab_size=VOCAB)
        self.folder = tmp_path / "weights"
        self.builds = Builds()
        self.source = CachedWeights(self.folder, self.builds, limit(20))

    def config(self, **changes: Any) -> None:
        config = CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | changes
        (self.model / "config.json").write_text(json.dumps(config))

    def options(self, **options: Any) -> ServerOptions:
        defaults = {"load_format": "dummy", "dtype": "float32", "max_total_tokens": 512, "device": "cpu"}
        return ServerOptions(model_path=str(self.model), **(defaults | options))

    def load(self, **options: Any) -> LoadedModel:
        return load_model(self.options(**options), weights_source=self.source)

    def logits(self, **options: Any) -> torch.Tensor:
        return logits_of(self.load(**options))

    def expected(self, **options: Any) -> torch.Tensor:
        """Compute logits of a model that is packed for this process alone."""
        return logits_of(load_model(self.options(**options)))

    def request(self, **options: Any) -> PackRequest:
        asked = self.options(**options)
        order = PackOrder(dataclasses.asdict(asked), "float32", "float32", None, 0, 1, 1, 0, 0)
        return order.read()

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.is_dir() else []

    @property
    def file(self) -> Path:
        (only,) = self.files
        assert only.suffix == ".weights"
        return only


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def logits_of(model: LoadedModel) -> torch.Tensor:
    table = torch.arange(512, dtype=torch.int32)[None]
    count = len(TOKENS)
    batch = ForwardBatch(
        input_ids=torch.tensor(TOKENS),
        positions=torch.arange(count),
        out_cache_loc=table[0, 16 : 16 + count].long(),
        rows=torch.tensor([0]),
        starts=[0],
        q_lens=[count],
        req_to_token=table[:, 16:].contiguous(),
        logit_indices=torch.arange(count),
    )
    return model.engine.forward(batch).clone()


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4", "quantized_activations": "int8"}],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_the_second_instance_packs_nothing_and_computes_the_same_bits(rig: Rig, options: dict[str, Any]) -> None:
    expected = rig.expected(**options)
    first, second = rig.load(**options), rig.load(**options)
    assert len(rig.builds.requests) == 1
    assert torch.equal(logits_of(first), expected)
    assert torch.equal(logits_of(second), expected)
    assert first.fingerprint == second.fingerprint
    assert first.weight_bytes == second.weight_bytes == rig.file.stat().st_size
    assert first.engine.step_weight_bytes == second.engine.step_weight_bytes > 0
    assert (first.quantization, first.quantized_activations) == (second.quantization, second.quantized_activations)


def test_instances_map_one_file_and_can_not_write_to_it(rig: Rig) -> None:
    models = [rig.load(), rig.load()]
    inode = str(rig.file.stat().st_ino)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert [fields[1] for fields in maps if fields[4] == inode] == ["r--s"] * len(models)
    assert rig.folder.stat().st_mode & 0o777 == 0o700
    assert rig.file.stat().st_mode & 0o077 == 0


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte of the header": lambda file: flip(file, 3),
    "a byte of the digest": lambda file: flip(file, HEADER.size - 1),
    "the first weight": lambda file: flip(file, BODY),
    "a byte in the middle": lambda file: flip(file, file.stat().st_size // 2),
    "the last byte": lambda file: flip(file, -1),
    "half of it": lambda file: os.truncate(file, file.stat().st_size // 2),
    "all of it": lambda file: os.truncate(file, 0),
    "more than it": lambda file: os.truncate(file, file.stat().st_size + 1),
    "no header": lambda file: os.truncate(file, 100),
    "mode": lambda file: file.chmod(0o666),
    "a link": lambda file: (file.rename(file.with_suffix(".moved")), file.symlink_to(file.with_suffix(".moved"))),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_built_again(rig: Rig, damage: Callable[[Path], object]) -> None:
    expected = rig.logits()
    file = rig.file
    damage(file)
    assert torch.equal(rig.logits(), expected)
    assert len(rig.builds.requests) == 2
    assert torch.equal(rig.logits(), expected)
    assert len(rig.builds.requests) == 2
    assert file.is_file()
    assert not file.is_symlink()


def test_a_damaged_file_is_named_in_the_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.load()
    flip(rig.file, BODY)
    rig.load()
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        f"{rig.file} is not used: its bytes have changed since it was written; the weights are packed again"
    ]


def test_a_file_of_another_model_is_built_again(rig: Rig) -> None:
    expected = rig.logits()
    name = rig.file.name
    rig.load(random_seed=1)
    (other,) = (file for file in rig.files if file.name != name)
    (rig.folder / name).write_bytes(other.read_bytes())
    assert torch.equal(rig.logits(), expected)
    assert len(rig.builds.requests) == 3


def as_foreign(state: os.stat_result) -> str:
    return f"it belongs to user 1234, not to {os.geteuid()}"


def test_a_file_of_another_user_is_built_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rig.logits()
    inode = rig.file.stat().st_ino
    real = trusted_path.distrust
    monkeypatch.setattr(cache, "distrust", lambda state: as_foreign(state) if state.st_ino == inode else real(state))
    assert torch.equal(rig.logits(), expected)
    assert len(rig.builds.requests) == 2
    assert rig.file.stat().st_ino != inode


def test_a_folder_of_another_user_is_not_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rig.logits()
    before = rig.file.stat()
    rig.folder.chmod(0o777)
    assert torch.equal(rig.logits(), expected)
    assert len(rig.builds.requests) == 2
    assert rig.file.stat() == before
    assert "chmod go-w" in caplog.text
    assert "--weights-cache" in caplog.text


def test_a_read_only_root_leaves_each_instance_a_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rig.expected()

    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr(cache, "make_private_folder", refuse)
    assert torch.equal(rig.logits(), expected)
    assert rig.files == []
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"packed weights can't be shared in {rig.folder} (Read-only file system): this process packs its own copy; "
        "choose another folder with --weights-cache"
    ]


def test_a_file_on_a_read_only_root_is_mapped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rig.logits()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("utime", "replace", "ftruncate", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    assert torch.equal(rig.logits(), expected)
    assert len(rig.builds.requests) == 1


def test_a_full_disk_leaves_each_instance_a_copy_and_no_file(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    expected = rig.expected()

    def fill(fd: int) -> None:
        if os.fstat(fd).st_nlink:
            os.pwrite(fd, bytes(1 << 16), 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rig.builds.before = fill
    assert torch.equal(rig.logits(), expected)
    assert rig.files == []
    assert "No space left on device" in caplog.text


def test_the_writer_names_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full, pytest.raises(OSError, match="No space left"):
        PackedModelWriter(full.fileno()).add(np.zeros(10))


def test_room_is_looked_for_before_anything_is_loaded(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    with pytest.raises(OSError, match="MiB of the disk are free") as caught:
        check_room(tmp_path, 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    fd = make_memory()
    check_room(fd, 1 << 60)
    os.close(fd)


def test_two_builders_at_once_pack_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rig.expected()
    waits = threading.Event()
    monkeypatch.setattr(cache.time, "sleep", lambda seconds: waits.set())

    def wait(fd: int) -> None:
        assert waits.wait(limit(20))

    rig.builds.before = wait
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(rig.source.open, rig.request()) for _ in range(2)]
        keys = {one.result(limit(20)).contents.key for one in both}
    assert len(keys) == len(rig.builds.requests) == 1
    assert torch.equal(rig.logits(), expected)
    assert len(rig.builds.requests) == 1
    assert rig.file


def test_a_builder_that_does_not_end_is_not_waited_for_forever(rig: Rig) -> None:
    request = rig.request()
    rig.folder.mkdir(mode=0o700)
    part = rig.folder / f"{request.name().key}.part"
    with part.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InvalidWeights, match=r"another process has been packing .* --weights-cache off"):
            CachedWeights(rig.folder, rig.builds, 0.0).open(request)
    rig.source.open(request)
    assert rig.file


@pytest.fixture
def builder() -> BuilderProcess:
    return BuilderProcess(1, limit(60), nullcontext)


def test_a_builder_that_is_killed_leaves_nothing_that_counts(
    rig: Rig, builder: BuilderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_process, "MODULE", "support.killed_builder")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with pytest.raises(InvalidWeights, match=r"ended by signal 9 \(Killed\)"):
        CachedWeights(rig.folder, builder, limit(20)).open(rig.request())
    assert rig.files == []
    assert torch.equal(rig.logits(), rig.expected())


def test_what_a_killed_instance_left_is_overwritten(rig: Rig) -> None:
    request = rig.request()
    rig.folder.mkdir(mode=0o700)
    (rig.folder / f"{request.name().key}.part").write_bytes(b"pdserve weights\n" * 100_000)
    assert torch.equal(rig.logits(), rig.expected())
    assert rig.file.stat().st_size == rig.source.open(request).memory.total


def test_a_process_packs_the_same_bytes(rig: Rig, builder: BuilderProcess, tmp_path: Path) -> None:
    CachedWeights(tmp_path / "of a process", builder, limit(20)).open(rig.request())
    rig.load()
    (other,) = (tmp_path / "of a process").iterdir()
    assert other.name == rig.file.name
    assert other.read_bytes() == rig.file.read_bytes()


def test_errors_of_the_process_are_passed_on(rig: Rig, builder: BuilderProcess) -> None:
    (rig.model / "model.safetensors").write_bytes(b"no tensors")
    request = rig.request(load_format="auto")
    with pytest.raises(InvalidWeights, match=r"model\.safetensors can't be read"):
        CachedWeights(rig.folder, builder, limit(20)).open(request)
    assert rig.files == []


def test_a_process_that_says_nothing_is_an_error() -> None:
    with pytest.raises(InvalidWeights, match="ended with code 3; see its log"):
        build_process._check(3, b"Traceback\n")
    with pytest.raises(OSError, match="full") as caught:
        build_process._check(0, b'\n{"error":"full","errno":28}\n')
    assert caught.value.errno == errno.ENOSPC


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


def test_weights_of_files_that_have_changed_are_removed_and_others_stay(rig: Rig, tmp_path: Path) -> None:
    rig.load()
    rig.load(random_seed=1)
    assert len(rig.files) == 2
    (tmp_path / "b").mkdir()
    other = Rig(tmp_path / "b")
    other.source, other.folder = rig.source, rig.folder
    other.load()
    assert len(rig.files) == 3
    rig.config(vocab_size=VOCAB, rms_norm_eps=1e-3)
    rig.load()
    model = rig.request().name().model
    assert sorted(file.name.startswith(model) for file in rig.files) == [False, True]


def test_weights_that_nobody_has_used_for_a_week_are_removed(rig: Rig) -> None:
    used, unused, part = (rig.folder / name for name in ("a-b-c.weights", "a-b-d.weights", "a-b-e.part"))
    held = rig.folder / "a-b-f.part"
    rig.folder.mkdir(mode=0o700)
    for file in (used, unused, part, held):
        file.touch()
    long_ago = time.time() - UNUSED_SECONDS - 60
    for file in (unused, part, held):
        os.utime(file, (long_ago, long_ago))
    with held.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        rig.load()
    assert {used, held} < set(rig.files)
    assert len(rig.files) == 3


def test_a_use_is_noted(rig: Rig) -> None:
    rig.load()
    os.utime(rig.file, (1.0, 1.0))
    rig.load()
    assert rig.file.stat().st_mtime > 1.0
    assert len(rig.builds.requests) == 1


def test_weights_that_were_dropped_are_mapped_again(rig: Rig) -> None:
    model = rig.load()
    expected = logits_of(model)
    inode = str(rig.file.stat().st_ino)
    model.engine.drop_weights()
    assert inode not in Path("/proc/self/maps").read_text().split()
    model.engine.take_weights()
    assert torch.equal(logits_of(model), expected)
    assert len(rig.builds.requests) == 1


def test_mapped_weights_leave_the_pool_less_room(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel counts the page cache as free, and a pool that took it would push the weights out.
    shared, private = rig.load(), load_model(rig.options())
    assert shared.weight_bytes == private.weight_bytes
    asked = rig.request()
    assert rig.source.open(asked).memory == (shared.weight_bytes, shared.weight_bytes)
    assert PrivateWeights(LocalBuilder()).open(asked).memory == (shared.weight_bytes, 0)


def test_private_weights_are_sealed() -> None:
    fd = make_memory()
    os.ftruncate(fd, BODY)
    seal_memory(fd)
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 2 * BODY)):
        with pytest.raises(PermissionError):
            change()
    os.close(fd)


def test_each_layer_is_given_back_when_it_is_packed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else start-up would take twice the weights."""
    held: list[int] = []
    loaded: list[Any] = []
    real_load, real_pack = WeightLoader.load, ModelPacker._pack_layer

    def load(self: WeightLoader) -> Any:
        loaded.append(real_load(self))
        return loaded[-1]

    def pack_layer(self: ModelPacker, i: int, layer: Any) -> None:
        real_pack(self, i, layer)
        linears = loaded[0].model.linears().values()
        held.append(sum(linear.weight.untyped_storage().nbytes() for linear in linears))

    monkeypatch.setattr(WeightLoader, "load", load)
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
        with pytest.raises(DamagedWeights, match="header"):
            PackedModel(opened.fileno(), "key")
        writer.finish(Contents("key", "f", "none", None, 1, [], [], [], BODY, [], 0))
        assert PackedModel(opened.fileno(), "key").contents.embedding == BODY
        with pytest.raises(DamagedWeights, match="another model"):
            PackedModel(opened.fileno(), "other")


def test_the_option_names_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights_folder(None) == tmp_path / "pdserve" / "weights"
    assert weights_folder("off") is None
    assert weights_folder(str(tmp_path / "x")) == tmp_path / "x"
