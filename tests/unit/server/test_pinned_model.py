"""All processes of a server load one commit of a hub model, also while its repository is pushed to. No network."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support.sim import SimInstance, make_options

from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.load import load_tokenizer
from pdserve.scheduler.features.idle_check import InvariantResult
from pdserve.scheduler.features.server_info import server_info
from pdserve.server import cluster, supervisor
from pdserve.server.cluster_options import ClusterOptions
from pdserve.server.http.served_model import ServedModel
from pdserve.server.http.status.info import FOR_USERS
from pdserve.server.instance import run_instance
from pdserve.server.options import ServerOptions
from pdserve.server.pinned_model import pin_model

MODEL, TOKENIZER = "some/model", "some/tokenizer"


def commit(number: int) -> str:
    return f"{number:040x}"


class Hub:
    """A hub on which each question for what is newest finds a newer commit."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self.asked: list[tuple[str, str | None]] = []
        self._newest = 0

    def snapshot_download(self, name: str, *, revision: str | None = None, **_: Any) -> str:
        self.asked.append((name, revision))
        if revision in (None, "main"):
            self._newest += 1
            revision = commit(self._newest)
        folder = self._cache / f"models--{name.replace('/', '--')}" / "snapshots" / str(revision)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of each instance that would have been started."""
    found: list[Any] = []

    class Launched:
        def __init__(self, options: Any, plan: Any = None, *, fork_server: Any = None) -> None:
            for process in plan.instances if plan is not None else ():
                found.append(process.command.typed_options())
            if plan is None:
                found.append(options)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", Launched)
    monkeypatch.setattr(cluster, "Cluster", Launched)
    for module in (supervisor, cluster):
        for name in ("harden", "configure_logging"):  # of this process
            monkeypatch.setattr(module, name, lambda *args, **options: None)
        monkeypatch.setattr(module.setproctitle, "setproctitle", lambda title: None)
    return found


@pytest.mark.parametrize("run", [run_instance, cluster.run_cluster], ids=["server", "up"])
@pytest.mark.parametrize("revision", [None, "main"])
def test_each_process_loads_the_commit_that_was_newest_at_the_start(
    hub: Hub,
    launched: list[Any],
    run: Callable[[Any], int],
    revision: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    options = ClusterOptions if run is cluster.run_cluster else ServerOptions
    assert run(options(model_path=MODEL, port=0, revision=revision)) == 0
    assert hub.asked == [(MODEL, revision)]
    assert {given.revision for given in launched} == {commit(1)}
    asked = revision or "the newest revision"
    assert f"{MODEL}: {asked} is commit {commit(1)} now; --revision pins it" in caplog.messages
    for given in launched:
        resolve_model(given.model_path, revision=given.revision)
        with pytest.raises(TokenizerLoadError):  # the folder has none
            load_tokenizer(given)
        ServedModel.read(given)
    assert set(hub.asked[1:]) == {(MODEL, commit(1))}


def test_a_tokenizer_of_its_own_is_pinned_as_well(hub: Hub) -> None:
    pinned = pin_model(ServerOptions(model_path=MODEL, tokenizer_path=TOKENIZER))
    assert (pinned.revision, pinned.tokenizer_revision) == (commit(1), commit(2))
    assert hub.asked == [(MODEL, None), (TOKENIZER, None)]


def test_a_commit_is_taken_as_it_is(hub: Hub) -> None:
    options = ServerOptions(model_path=MODEL, revision=commit(7))
    assert pin_model(options) == options
    assert hub.asked == []


@pytest.mark.parametrize("name", ["smollm2", "folder", "model.gguf", "/not/there", "./not-there", "no.gguf"])
def test_what_is_not_from_the_hub_stays_as_it_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("model.gguf").touch()
    options = ServerOptions(model_path=name, tokenizer_path="folder")
    assert pin_model(options) == options
    assert hub.asked == []


@pytest.mark.parametrize("run", [run_instance, cluster.run_cluster], ids=["server", "up"])
def test_a_hub_that_does_not_answer_is_reported_before_anything_starts(
    launched: list[Any],
    run: Callable[[Any], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unreachable(name: str, **_: Any) -> str:
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    options = ClusterOptions if run is cluster.run_cluster else ServerOptions
    assert run(options(model_path=MODEL, port=0)) == 1
    assert launched == []
    assert f"'{MODEL}' is neither a local path nor in the hub's cache" in caplog.text


def test_server_info_tells_every_client_the_commit() -> None:
    sim = SimInstance(make_options(model_path=MODEL, revision=commit(1)))
    assert server_info(sim.scheduler, "epoch", InvariantResult())["revision"] == commit(1)
    assert "revision" in FOR_USERS
