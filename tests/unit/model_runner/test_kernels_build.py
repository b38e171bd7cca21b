"""When the kernels are compiled, when that is not tried again, and where they can't be had at all."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from pdserve.model_runner.cpu_engine import build, library
from pdserve.model_runner.cpu_engine.build import LEVELS, BuildError
from pdserve.model_runner.engines.load import load_model
from pdserve.server.options import ServerOptions

LEVEL = LEVELS[-1]


class Compiler:
    """A ``g++`` that counts its calls, and does what ``works`` says."""

    def __init__(self, folder: Path) -> None:
        self._path, self._calls = folder / "g++", folder / "calls"
        self._calls.touch()
        self.works(False)

    def works(self, works: bool) -> None:
        """Install another version of the compiler, which works or not."""
        end = 'while [ "$1" != -o ]; do shift; done; : > "$2"' if works else "echo 'no such intrinsic' >&2; exit 1"
        self._path.write_text(f'#!/bin/sh\necho >> "{self._calls}"\n{end}\n')
        self._path.chmod(0o755)

    @property
    def calls(self) -> int:
        """How often it was called."""
        return len(self._calls.read_text().splitlines())

    def touch(self) -> None:
        """Change the file's time, as installing it again would."""
        os.utime(self._path, ns=(1, 1))


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


def test_prebuilt_libraries_are_found_first(
    compiler: Compiler, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    there = tmp_path / build.library_path(LEVEL, sources).name
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
