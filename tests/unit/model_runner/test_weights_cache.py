"""Packed weights that instances share: one copy, right or built again, whatever happens to the file or to a builder."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine import limit
from support.weights_rig import VOCAB, Rig, logits_of

from pdserve.model_files.errors import InvalidWeights
from pdserve.model_files.model_path import ModelSource
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.packed_model import (
    BODY,
    HEADER,
)
from pdserve.model_runner.weights_cache import build_process, cache
from pdserve.model_runner.weights_cache.build_process import BuilderProcess
from pdserve.model_runner.weights_cache.cache import UNUSED_SECONDS, CachedWeights, weights_folder
from pdserve.runtime import trusted_path

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


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


def test_random_weights_need_no_room_for_a_file_that_is_not_read(rig: Rig) -> None:
    """The file still counts for the name, because it describes the model."""
    file = rig.folder.with_suffix(".gguf")
    file.write_bytes(bytes(1000))
    dummy = dataclasses.replace(rig.request(), source=ModelSource("gguf", file))
    read = dataclasses.replace(dummy, options=dataclasses.replace(dummy.options, load_format="auto"))
    assert (dummy.source_bytes, read.source_bytes, rig.request().source_bytes) == (0, 1000, 0)
    before = dummy.name()
    file.write_bytes(bytes(999))
    assert dummy.name().source != before.source


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
    rig.load()
    data = rig.file.read_bytes()
    used, unused, part = (rig.folder / name for name in ("a-b-c.weights", "a-b-d.weights", "a-b-e.part"))
    held = rig.folder / "a-b-f.part"
    for file in (used, unused, part, held):
        file.write_bytes(data)
    long_ago = time.time() - UNUSED_SECONDS - 60
    for file in (unused, part, held):
        os.utime(file, (long_ago, long_ago))
    with held.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        rig.load(random_seed=1)
    assert {used, held} < set(rig.files)
    assert len(rig.files) == 4


def test_weights_of_a_model_that_is_gone_are_removed(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = Rig(tmp_path / "b")
    other.source, other.folder = rig.source, rig.folder
    other.load()
    gone = rig.file
    damaged = rig.folder / "a-b-c.weights"
    damaged.write_bytes(b"nothing")
    shutil.rmtree(other.model)
    rig.load()
    assert gone not in rig.files
    assert damaged not in rig.files
    assert rig.file


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


def test_the_option_names_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights_folder(None) == tmp_path / "pdserve" / "weights"
    assert weights_folder("off") is None
    assert weights_folder(str(tmp_path / "x")) == tmp_path / "x"
