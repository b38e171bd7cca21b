"""What is said while something takes long: lines in the log, none for what is soon done, and no bars."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from support.machine import limit
from support.processes import wait_until
from support.web_server import Connection, web_server

from pdserve.model_files import download_log
from pdserve.model_files.download_log import DownloadLog
from pdserve.model_runner.cpu_engine import build
from pdserve.model_runner.loader.arrays import Array, copy_converted
from pdserve.model_runner.loader.base import Target, WeightSource, load_weights
from pdserve.model_runner.loader.host_weights import ArrayPlace
from pdserve.runtime import progress
from pdserve.runtime.progress import ProgressLog

log = logging.getLogger("pdserve.test")
SHA = "a" * 40
FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"x" * 1000}
DOWNLOAD = """
import logging, sys
from pdserve.model_files import download_log
from pdserve.model_files.model_path import resolve_model
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(message)s")
download_log.EVERY_SECONDS = 0.0
print(resolve_model("org/name").path)
"""


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Every line of the log so far."""
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at each step."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(download_log, "EVERY_SECONDS", 0.0)


def test_a_line_every_few_seconds_and_none_at_the_end(said: Callable[[], list[str]]) -> None:
    times = iter([0.0, 1.0, 4.9, 5.1, 9.0, 10.2, 30.0])
    work = ProgressLog(log, "digging", 200, times.__next__)
    for amount in (20, 20, 20, 20, 20, 100):
        work.advance(amount)
    assert said() == ["digging: 30 % after 5 s", "digging: 50 % after 10 s"]


@pytest.mark.usefixtures("at_once")
def test_loading_counts_bytes(said: Callable[[], list[str]]) -> None:
    class Source(WeightSource):
        def tensors(self) -> Iterator[tuple[str, Array]]:
            yield "small", np.ones(10, np.float32)
            yield "big", np.ones(30, np.float32)

    sizes = {"big": np.empty(30, np.float32), "small": np.empty(10, np.float32)}
    targets = {name: Target(ArrayPlace(view, copy_converted), view.shape) for name, view in sizes.items()}
    load_weights(targets, Source())
    assert said() == ["loading the weights: 25 % after 0 s"]


@pytest.mark.usefixtures("at_once")
def test_building_counts_sources(
    said: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(tmp_path, monkeypatch)
    build.build(build.LEVELS[-1], make_sources(tmp_path, "a", "b", "c"))
    assert [line.partition(" after ")[0] for line in said() if "%" in line] == [
        f"building the CPU kernels: {percent} %" for percent in (25, 50, 75)
    ]


def test_who_waits_for_another_process_to_build_says_so(
    said: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(tmp_path, monkeypatch)
    level, sources = build.LEVELS[-1], make_sources(tmp_path, "a")
    path = build.library_path(level, sources)
    path.parent.mkdir(parents=True)
    builder = threading.Thread(target=build.build, args=(level, sources))
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        builder.start()
        wait_until(lambda: any("another process is building" in line for line in said()), 20, "the builder waits")
        assert not path.exists()
    builder.join()
    assert path.exists()


def make_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a compiler that writes empty files, and an empty cache."""
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_sources(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.cpp").write_text(f"int {name};")
    return folder


@pytest.mark.usefixtures("at_once")
def test_a_download_is_logged_and_drawn_nowhere(
    said: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with DownloadLog(total=4, desc="Fetching 4 files") as bar:
        for _ in range(4):
            bar.update(1)
    with DownloadLog(total=0, desc="Reconstructing", unit="B") as bar:
        bar.total = 10
        bar.update(5)
    assert said() == [f"Fetching 4 files: {percent} %" for percent in (0, 25, 50, 75)]
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_download_from_a_hub(tmp_path: Path) -> None:
    """The library that downloads asks for more of a bar in one version than in another."""
    scripts = hub_scripts("org/name")
    with web_server(scripts) as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        argv = [sys.executable, "-c", DOWNLOAD]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=limit(60), check=False)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    assert "pdserve.model_files.download_log Fetching 3 files: 33 %" in done.stderr
    assert "\r" not in done.stderr


def hub_scripts(name: str) -> Mapping[str, Callable[[Connection], None]]:
    """Return the scripts of a hub with one model."""

    def listing(connection: Connection) -> None:
        siblings = [{"rfilename": file} for file in FILES]
        connection.answer(200, {"id": name, "modelId": name, "sha": SHA, "siblings": siblings})

    def tree(connection: Connection) -> None:
        digests = {file: hashlib.sha1(content).hexdigest() for file, content in FILES.items()}
        entries = [{"type": "file", "path": f, "size": len(FILES[f]), "oid": digests[f]} for f in FILES]
        connection.answer(200, entries)

    def file(connection: Connection) -> None:
        content = FILES[connection.path.rsplit("/", 1)[1]]
        etag = json.dumps(hashlib.sha1(content).hexdigest())
        connection.answer(200, content, "application/octet-stream", {"etag": etag, "x-repo-commit": SHA})

    return {
        f"/api/models/{name}/revision/main": listing,
        f"/api/models/{name}": listing,
        f"/api/models/{name}/tree/{SHA}": tree,
        f"/api/models/{name}/tree/main": tree,
        **{f"/{name}/resolve/{SHA}/{path}": file for path in FILES},
    }
