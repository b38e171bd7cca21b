"""Shared by the end-to-end tests: the tiny model, and servers that several files use one after another.

A shared server is started once by each worker that needs it, and ends with the worker's last end-to-end test. Every
file gets it idle, with an empty cache, and returns it so. A test that kills, drains or reconfigures its server starts
one of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tiny_model
from support.processes import ONE_THREAD, Launched, Pair, launched, pd_pair, wait_until


@pytest.fixture(scope="session")
def tiny_args(tmp_path_factory) -> list[str]:
    """Flags that serve a tiny random model: one for all workers, so that its weights are packed once."""
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    made, folder = tmp_path_factory.mktemp("tiny"), run / "tiny-model"
    args = tiny_model.drawn_args(made)
    with contextlib.suppress(OSError):  # another worker was first
        made.rename(folder)
    return [str(folder) if arg == str(made) else arg for arg in args]


@pytest.fixture(scope="package")
def _alone(tmp_path_factory, tiny_args) -> Iterator[Launched]:
    # Tests read the ports and the maps of each process. Without the flag only root may.
    args = [*ONE_THREAD, *tiny_args, "--allow-core-dumps"]
    with launched(tmp_path_factory.mktemp("alone"), "alone", "server", *args) as server:
        server.wait_healthy()
        yield server


@pytest.fixture(scope="module")
def alone(_alone: Launched) -> Iterator[Launched]:
    """One unified instance of the tiny model: what it answers is the reference for others."""
    yield _alone
    assert_returned(_alone)


@pytest.fixture(scope="package")
def _small_pair(tmp_path_factory, tiny_args) -> Iterator[Pair]:
    pools = ("--chunked-prefill-size", "64", "--max-total-tokens", "4096", "--schedule-conservativeness", "0.3")
    quiet = "--disable-access-log"
    with pd_pair(tmp_path_factory.mktemp("small"), "tcp", *tiny_args, *pools, quiet, router_args=[quiet]) as pair:
        yield pair


@pytest.fixture(scope="module")
def small_pair(_small_pair: Pair) -> Iterator[Pair]:
    """A pair by tcp with small pools: requests wait for memory and are retracted. It keeps no access log."""
    yield _small_pair
    _small_pair.assert_all_returned()
    for server in (_small_pair.prefill, _small_pair.decode):
        assert_returned(server)


@pytest.fixture(scope="package")
def secrets(tmp_path_factory) -> Path:
    """A folder of cluster secrets: ``ours``, and ``both``, which begins with another one."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "ours").write_text("o" * 40 + "\n")
    (folder / "both").write_text("n" * 40 + "\n" + "o" * 40 + "\n")
    return folder


@pytest.fixture(scope="package")
def _secret_pair(tmp_path_factory, tiny_args, secrets) -> Iterator[Pair]:
    ours, both = (["--cluster-secret-file", str(secrets / name)] for name in ("ours", "both"))
    tmp = tmp_path_factory.mktemp("secret-pair")
    # Tests read the maps of each process. Without the flag only root may.
    args, decode_args = [*tiny_args, "--allow-core-dumps"], [*ours, "--return-kv"]
    router_args = ["--allow-core-dumps", *ours]
    with pd_pair(tmp, "tcp", *args, router_args=router_args, prefill_args=both, decode_args=decode_args) as pair:
        yield pair


@pytest.fixture(scope="module")
def secret_pair(_secret_pair: Pair) -> Iterator[Pair]:
    """A pair by tcp with a secret, which the decode is about to change: it uses another first.

    The decode returns the KV of finished requests to the prefill.
    """
    yield _secret_pair
    for server in (_secret_pair.prefill, _secret_pair.decode):
        assert_returned(server)


def assert_returned(server: Launched) -> None:
    """Wait until ``server`` is idle and its memory free; empty its cache."""

    def idle() -> bool:
        info = server.info()
        return info["requests"]["total"] == info["pool"]["in_use"] == info["invariants_steps_ago"] == 0

    wait_until(idle, 15, "a shared server is idle with no slot in use")
    assert server.info()["invariants"] == "ok"
    assert server.post("/flush_cache", {}).status_code == 200
