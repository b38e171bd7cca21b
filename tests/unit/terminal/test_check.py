"""``pdserve check``: what each probe says of a machine, and that none of them can hang or fail for all."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec._core
import pytest
from support.machine import limit

from pdserve.disaggregation.errors import BackendUnavailable
from pdserve.disaggregation.transfer.backends.load import find_backend
from pdserve.mem_cache.kv_pages.region import RegionError
from pdserve.model_runner.cpu_engine import build
from pdserve.model_runner.cpu_engine.failed_build import FailedBuild
from pdserve.runtime.machine.control_groups import SystemTree
from pdserve.runtime.private_cache import publish_sealed
from pdserve.runtime.transfer_backends import BACKENDS
from pdserve.terminal.check import host, kernels, ports, run, software
from pdserve.terminal.check.backends import look_at_backends
from pdserve.terminal.check.finding import Finding, Level, ok, problem, warning
from pdserve.terminal.check.options import CheckOptions
from pdserve.terminal.check.probe import Probe, run_probe

GIB = 2**30
LEVEL = build.LEVELS[-1]
NEEDS = {name: spec.needs for name, spec in BACKENDS.items() if spec.needs is not None}


def only(findings: Iterable[Finding]) -> Finding:
    [finding] = findings
    return finding


# The runner


def test_a_probe_that_fails_or_hangs_is_a_problem_and_no_more() -> None:
    def fails() -> list[Finding]:
        raise ZeroDivisionError("how odd")

    over, begin = threading.Event(), time.monotonic()
    found = [*run_probe(Probe("a", fails)), *run_probe(Probe("b", lambda: over.wait() and [], 0.02))]
    assert time.monotonic() - begin < limit(4)
    over.set()
    assert [(f.topic, f.level) for f in found] == [("a", Level.PROBLEM), ("b", Level.PROBLEM)]
    assert "ZeroDivisionError: how odd" in found[0].text
    assert "no answer within 0.02 s" in found[1].text


@pytest.mark.parametrize(("level", "code"), [(Level.OK, 0), (Level.WARNING, 0), (Level.PROBLEM, 1)])
def test_the_exit_code_and_the_json_say_how_bad_it_is(
    level: Level, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [ok("first", "good"), Finding("second", level, "so so", "do this")]
    monkeypatch.setattr(run, "choose_probes", lambda options: [Probe("x", lambda: found)])
    assert run.run_check(CheckOptions()) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "first", "good"]
    assert lines[1].split() == [str(level), "second", "so", "so"]
    assert lines[2].strip() == "do this"
    assert run.run_check(CheckOptions(json=True)) == code
    report = json.loads(capsys.readouterr().out)
    assert (report["level"], report["pdserve"]) == (str(level), version("pdserve"))
    assert report["findings"][1] == {"topic": "second", "level": str(level), "text": "so so", "advice": "do this"}


def test_all_of_it_on_this_machine_without_torch() -> None:
    """The default model can be served wherever the tests run; torch takes seconds to import."""
    code = (
        "import sys\n"
        "from pdserve.terminal.check.run import run_check\n"
        "from pdserve.terminal.check.options import CheckOptions\n"
        "code = run_check(CheckOptions(model_path='smollm2', json=True, ports=[1]))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60), check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f["topic"] for f in report["findings"]} >= {"python", "packages", "processor", "kernels", "model", "fit"}


def test_a_bad_key_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text("\n")
    assert run.run_check(CheckOptions(url="http://127.0.0.1:1", api_key_file=file)) == 2
    assert "has no key" in capsys.readouterr().err


# Software


def test_python_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(software.look_at_python()).level is Level.OK
    assert only(software.look_at_packages()).level is Level.OK
    monkeypatch.setattr(software, "metadata", lambda name: {"Requires-Python": ">=4"})
    assert "pdserve needs >=4" in only(software.look_at_python()).text
    needs = ["numpy<1", "no-such-package-at-all>=1", "msgspec", 'pytest<1; extra == "dev"']
    monkeypatch.setattr(software, "requires", lambda name: needs)
    finding = only(software.look_at_packages())
    assert finding.level is Level.PROBLEM
    assert finding.text == f"numpy is {version('numpy')} and should be <1; no-such-package-at-all is missing"


@pytest.mark.parametrize(
    ("torch_version", "gpus", "level", "says"),
    [
        ("2.13.0+cpu", 0, Level.OK, "the processor computes"),
        ("2.13.0+cpu", 2, Level.WARNING, "can't use the 2 NVIDIA GPUs"),
        ("2.13.0+cu130", 1, Level.OK, "1 NVIDIA GPU:"),
    ],
)
def test_torch(
    torch_version: str, gpus: int, level: Level, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidiactl", *(f"nvidia{i}" for i in range(gpus))):
        (tmp_path / name).touch()
    monkeypatch.setattr(software, "version", lambda name: torch_version)
    finding = only(software.look_at_torch(tmp_path))
    assert finding.level is level
    assert says in finding.text


# The host


def make_tree(folder: Path, quota: str, available_kib: int) -> SystemTree:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/meminfo": f"MemTotal: 16777216 kB\nMemAvailable: {available_kib} kB\n",
        "proc/cpuinfo": "processor : 0\nmodel name : Abacus 3000\n",
        "sys/fs/cgroup/cpu.max": quota,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return SystemTree(folder / "proc", folder / "sys")


def test_cores_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    good = make_tree(tmp_path / "good", "max 100000", 8 << 20)
    finding = only(host.look_at_cores(good))
    assert finding.level is Level.OK
    assert finding.text.startswith("Abacus 3000; an instance takes 2 compute threads")
    assert only(host.look_at_memory(good)) == ok(
        "memory", "8.0 of 16.0 GiB free, within the limits of the control groups"
    )
    tight = make_tree(tmp_path / "tight", "50000 100000", 1 << 20)
    finding = only(host.look_at_cores(tight))
    assert finding.level is Level.WARNING
    assert "a CPU quota of 0.5 cores" in finding.text
    assert only(host.look_at_memory(tight)).level is Level.WARNING
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert "takes turns" in only(host.look_at_cores(good)).advice


def test_open_files() -> None:
    assert only(host.look_at_files((1024, resource.RLIM_INFINITY))) == ok(
        "open files", "1024, which pdserve raises to no limit"
    )
    finding = only(host.look_at_files((1024, 4096)))
    assert finding.level is Level.WARNING
    assert "needs 6912" in finding.advice


def test_folder_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEAST_FREE", 1)
    monkeypatch.setattr(host, "SOCKET_PATH_CHARS", len(str(tmp_path)) + host.RUN_DIR_CHARS)
    assert only(host.look_at_run_dir(tmp_path)).level is Level.OK
    monkeypatch.setattr(host, "LEAST_FREE", 1 << 62)
    assert "is full" in only(host.look_at_run_dir(tmp_path)).text
    monkeypatch.setattr(host, "SOCKET_PATH_CHARS", len(str(tmp_path)) + host.RUN_DIR_CHARS - 1)
    assert "Unix sockets don't fit" in only(host.look_at_run_dir(tmp_path)).text
    assert "no folder for temporary files" in only(host.look_at_run_dir(tmp_path / "none")).text


def test_a_socket_of_an_instance_has_no_longer_path(tmp_path: Path) -> None:
    """The longest name that the kernel takes is what the probe believes it to be."""
    with socket.socket(socket.AF_UNIX) as sock:
        name = str(tmp_path / "x") + "y" * (host.SOCKET_PATH_CHARS - len(str(tmp_path / "x")))
        sock.bind(name)
        with pytest.raises(OSError, match="too long"):
            sock.bind(name + "y")


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(host.look_at_shared_memory()).level is Level.OK

    def refuse(nbytes: int, *, shared: bool) -> None:
        raise RegionError("can't reserve: Function not implemented")

    monkeypatch.setattr(host, "allocate_region", refuse)
    finding = only(host.look_at_shared_memory())
    assert finding.level is Level.WARNING
    assert "tcp" in finding.advice


# Kernels


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no compiler, and the level that all have; returns where the library would be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(kernels, "choose_level", lambda: LEVEL)
    path = build.library_path(LEVEL)
    path.parent.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    return path


def test_kernels_without_and_with_a_compiler(nothing_built: Path, tmp_path: Path) -> None:
    finding = only(kernels.look_at_kernels())
    assert finding.level is Level.WARNING
    assert "no C++ compiler" in finding.text
    assert not kernels.can_use_kernels()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    finding = only(kernels.look_at_kernels())
    assert finding.level is Level.OK
    assert f"not built yet: the first start does it with {compiler}" in finding.text
    assert kernels.can_use_kernels()
    FailedBuild(build.library_path(LEVEL)).remember("no such intrinsic\nmore")
    finding = only(kernels.look_at_kernels())
    assert finding.level is Level.WARNING
    assert finding.text.endswith(f"but {compiler} failed: no such intrinsic")
    assert not kernels.can_use_kernels()


def test_kernels_that_are_built(nothing_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.so"
    made.write_bytes(b"no library")
    publish_sealed(made, nothing_built)
    finding = only(kernels.look_at_kernels())
    assert finding.level is Level.PROBLEM
    assert f"{nothing_built} can't be loaded" in finding.text
    # Any library will do.
    shutil.copy(msgspec._core.__file__, made)
    publish_sealed(made, nothing_built)
    chosen = " (as PDSERVE_CPU_ISA says)" if build.ISA_VARIABLE in os.environ else ""
    assert only(kernels.look_at_kernels()).text == f"level {LEVEL.name}{chosen}, built: {nothing_built}"
    monkeypatch.setenv(build.ISA_VARIABLE, LEVEL.name)
    assert "(as PDSERVE_CPU_ISA says)" in only(kernels.look_at_kernels()).text


def test_kernels_on_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    finding = only(kernels.look_at_kernels())
    assert (finding.level, finding.text) == (
        Level.WARNING,
        "the CPU kernels are written for x86_64, and this processor is aarch64",
    )


# Backends and ports


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDS:
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], path="no_such_module.Backend"))
    good, *missing = look_at_backends()
    assert good.text.startswith("tcp, shm, fake can be loaded")
    assert [finding.level for finding in missing] == [Level.OK] * len(NEEDS)
    assert [finding.text for finding in missing] == [f"not installed: {name}: {how}" for name, how in NEEDS.items()]


@pytest.mark.parametrize("name", NEEDS)
def test_a_backend_that_is_not_installed_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], path="no_such_module.Backend"))
    with pytest.raises(BackendUnavailable, match=re.escape(NEEDS[name])):
        find_backend(name)


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, free_port = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        first, second = ports.look_at_ports({port: "router", free_port: ""})
    assert first.level is Level.WARNING
    assert f"{port} (router) is taken, by process {os.getpid()} (" in first.text
    assert second == ok("ports", f"{free_port} is free")


def test_ports_of_ours_and_of_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made process files: ours on one port, one of another user on the other."""
    (tmp_path / "net").mkdir()
    row = "  {}: 0100007F:{:04X} 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1 0 100 0\n"
    rows = [row.format(0, 8000, "0A", 11), row.format(1, 9000, "0A", 22), row.format(2, 7000, "01", 33)]
    (tmp_path / "net" / "tcp").write_text("  sl  local_address\n" + "".join(rows))
    for pid, inode, title in ((7, 33, b"curl"), (8, 11, b"pdserve router:8000\0\0")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
        (tmp_path / str(pid) / "cmdline").write_bytes(title)

    def taken(host: str, port: int) -> None:
        raise OSError(98, "Address already in use")

    # A client's end of a connection is no listener.
    assert ports.find_listener(7000, tmp_path) is None
    monkeypatch.setattr(ports, "check_port_free", taken)
    ours, strange = ports.look_at_ports({8000: "", 9000: ""}, tmp_path)
    assert ours == ok("ports", "8000 is pdserve router:8000's, process 8")
    assert strange.level is Level.WARNING
    assert "of another user" in strange.text


def test_levels_are_ordered_from_good_to_bad() -> None:
    assert [f.level for f in (ok("", ""), warning("", ""), problem("", ""))] == list(Level)
