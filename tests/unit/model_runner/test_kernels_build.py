"""When the kernels are compiled, when that is not tried again, and where they can't be had at all."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

import pytest

from pdserve.model_runner.cpu_engine import build, library
from pdserve.model_runner.cpu_engine.build import LEVELS, BuildError
from pdserve.model_runner.engines.load import load_model
from pdserve.runtime.trusted_path import make_private_folder
from pdserve.server.options import ServerOptions

LEVEL = LEVELS[-1]


class Compiler:
    """A ``g++`` that counts its calls, and does what ``works`` says."""

    def __init__(self, folder: Path) -> None:
        self._path, self._calls = folder / "g++", folder / "calls"
        self._calls.touch()
        self.works(False)

    def works(self, works: bool, output: str = "") -> None:
        """Install another version of the compiler, which writes ``output``."""
        write = f'while [ "$1" != -o ]; do shift; done; printf %s "{output}" > "$2"'
        end = write if works else "echo 'no such intrinsic' >&2; exit 1"
        self._path.write_text(f'#!/bin/sh\necho >> "{self._calls}"\n{end}\n')
        self._path.chmod(0o755)

    @property
    def calls(self) -> int:
        """How often it was called."""
        return len(self._calls.read_text().splitlines())

    def touch(self) -> None:
        """Change the file's time, as installing it again would."""
        os.utime(self._path, ns=(1, 1))

    def vanish(self) -> None:
        """Remove it."""
        self._path.unlink()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The only compiler there is, and an empty cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Compiler(tmp_path / "bin")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.cpp").write_text("int a;")
    return folder


def fails(sources: Path, *, retry: bool = False) -> str:
    with pytest.raises(BuildError) as caught:
        build.build(LEVEL, sources, retry=retry)
    return str(caught.value)


def test_a_failed_build_is_not_tried_again_by_the_same_compiler(compiler: Compiler, sources: Path) -> None:
    first = fails(sources)
    assert "no such intrinsic" in first
    again = fails(sources)
    assert again.startswith(first)
    assert f"python -m {build.MODULE}" in again
    assert compiler.calls == 1
    fails(sources, retry=True)
    assert compiler.calls == 2
    fails(sources)
    assert compiler.calls == 2


def test_what_an_ended_build_left_is_removed_after_a_while(compiler: Compiler, sources: Path) -> None:
    compiler.works(True)
    folder = build.library_path(LEVEL, sources).parent
    make_private_folder(folder)
    old, new = folder / f"{build.BUILD_PREFIX}old", folder / f"{build.BUILD_PREFIX}new"
    for left in (old, new):
        left.mkdir()
        (left / "a.o").touch()
    os.utime(old, (1, 1))
    assert build.build(LEVEL, sources).is_file()
    assert new.exists()
    assert not old.exists()


def test_another_process_that_builds_is_not_waited_for_for_ever(
    compiler: Compiler, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a failure is not remembered, as it says nothing about the compiler."""
    monkeypatch.setattr(build, "WAIT_SECONDS", 0.0)
    compiler.works(True)
    folder = build.library_path(LEVEL, sources).parent
    make_private_folder(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = fails(sources)
    assert "another process has been building the CPU kernels" in message
    assert f"(fuser {folder / 'lock'} names it); start again when it is done, or end it if it hangs" in message
    assert compiler.calls == 0
    assert build.build(LEVEL, sources).is_file()


def test_other_sources_and_other_compilers_are_tried(compiler: Compiler, sources: Path) -> None:
    fails(sources)
    compiler.touch()
    fails(sources)
    assert compiler.calls == 2
    (sources / "a.cpp").write_text("int b;")
    fails(sources)
    assert compiler.calls == 3
    compiler.works(True)
    path = build.build(LEVEL, sources)
    assert path.is_file()
    assert compiler.calls == 5  # the source, and the library of it
    assert not path.with_suffix(".failed").exists()


def test_a_library_does_not_outlive_its_compiler(compiler: Compiler, sources: Path) -> None:
    compiler.works(True)
    first = build.build(LEVEL, sources)
    compiler.touch()
    second = build.build(LEVEL, sources)
    assert second != first
    assert compiler.calls == 4
    # Without any compiler, the newest library is better than none.
    os.utime(first, ns=(1, 1))
    compiler.vanish()
    assert build.build(LEVEL, sources) == second
    os.utime(second, ns=(0, 0))
    assert build.build(LEVEL, sources) == first


@pytest.mark.parametrize("damage", [b"", b"half of"])
def test_a_damaged_library_is_built_again(compiler: Compiler, sources: Path, damage: bytes) -> None:
    compiler.works(True, "half of it")
    path = build.build(LEVEL, sources)
    path.write_bytes(damage)
    assert build.find_library(path) is None
    assert build.build(LEVEL, sources) == path
    assert path.read_bytes() == b"half of it"
    assert compiler.calls == 4
    path.with_suffix(".sha256").unlink()
    build.build(LEVEL, sources)
    assert compiler.calls == 6


def test_a_library_is_on_the_disk_before_its_name_is(
    compiler: Compiler, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.works(True, "whole")
    real_sync, real_replace, synced = os.fsync, os.replace, []

    def sync(fd: int) -> None:
        real_sync(fd)
        synced.append(os.fstat(fd).st_ino)

    def replace(made: Path, path: Path) -> None:
        assert os.stat(made).st_ino == synced[-1]
        real_replace(made, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    path = build.build(LEVEL, sources)
    assert synced == [
        path.with_suffix(".sha256").stat().st_ino,
        path.parent.stat().st_ino,
        path.stat().st_ino,
        path.parent.stat().st_ino,
    ]


def test_a_library_that_this_system_can_not_load_is_built_once_more(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "none")
    compiler.works(True, "of a newer system")
    library.load_library.cache_clear()
    with pytest.raises(BuildError, match="can't be loaded"):
        library.load_library()
    path = build.library_path(build.choose_level())
    built_once = len(list(build.SOURCES.rglob("*.cpp"))) + 1
    assert compiler.calls == 2 * built_once
    assert [record.getMessage() for record in caplog.records if "it is built again" in record.getMessage()] != []
    assert path.is_file()


def test_prebuilt_libraries_are_found_first(
    compiler: Compiler, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    there = tmp_path / build.prebuilt_name(build.library_path(LEVEL, sources))
    there.touch()
    assert build.build(LEVEL, sources) == there
    # It belongs to its sources.
    (sources / "a.cpp").write_text("int b;")
    fails(sources)
    assert compiler.calls == 1


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


@pytest.mark.usefixtures("arm")
def test_another_architecture_runs_on_the_reference_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    options = ServerOptions(model_path=str(tmp_path), load_format="dummy", device="cpu", max_total_tokens=64)
    with caplog.at_level(logging.WARNING):
        assert load_model(options).engine.attention_backend == "torch"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("running on the torch reference")
    assert line.endswith("the CPU kernels are written for x86_64, and this processor is aarch64")
