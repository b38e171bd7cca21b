"""``pdserve bench kernel``: without a GPU it compiles what a launch would, with other tiles where they are given.

``unit/model_runner/test_triton_ops.py`` runs ``device/test_device_bench_kernel.py`` in Triton's interpreter.
"""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from pdserve.benchmark.errors import BenchError, BenchOptionsError
from pdserve.benchmark.kernel import resources, timing
from pdserve.benchmark.kernel.case import Ask, Case, Mode, Place
from pdserve.benchmark.kernel.cases import CASES
from pdserve.benchmark.kernel.facts import KERNELS
from pdserve.benchmark.kernel.launches import launched, on_paper
from pdserve.benchmark.kernel.options import KernelBenchOptions
from pdserve.benchmark.kernel.resources import programs_that_fit, resources_of
from pdserve.benchmark.kernel.run import _measured, run_kernel_bench
from pdserve.benchmark.kernel.timing import Rates, Times, roofline
from pdserve.model_runner.device.triton_compiler import CompileError

PAPER = Place(Mode.ON_PAPER, torch.device("cpu"), 90)


def on_paper_case(kernel: Any, **tile: int) -> Case:
    facts = KERNELS[kernel]
    with on_paper(90):
        return CASES[kernel](Ask(facts.shape, facts.variants[0], tile, torch.bfloat16), PAPER)


@pytest.mark.parametrize(
    ("kernel", "tile", "constants", "warps"),
    [
        ("decode", {"block_n": 32, "num_warps": 8}, {"BLOCK_N": 32, "GROUP": 4, "PAGE_SIZE": 16}, 8),
        ("prefill", {"block_m": 64}, {"BLOCK_M": 64, "BLOCK_N": 64}, 8),
        ("int4", {"N": 64}, {"M": 16, "N": 64, "K": 64, "GROUP": 128, "zeros_ptr": None}, 4),
        ("fp8", {"K": 64}, {"M": 16, "N": 32, "K": 64, "ROWS": 128, "BLOCKED": True, "EIGHT": False}, 4),
        ("experts_up", {"M": 32, "num_warps": 8}, {"M": 32, "N": 64}, 8),
        ("experts_down", {}, {"M": 64, "N": 128}, 4),
        ("norm", {}, {"BLOCK": 4096}, 8),
    ],
)
def test_what_is_compiled_is_what_the_server_launches_but_for_the_tile(kernel, tile, constants, warps) -> None:
    requests = launched(on_paper_case(kernel, **tile).run, 90, has_gpu=False)
    main = next(r for r in requests if constants.items() <= r.constants.items())
    assert (main.capability, main.num_warps) == (90, warps)
    assert main.num_stages == tile.get("num_stages", main.num_stages)
    # Pointers are of the activations' type, and sizes that are multiples of 16 are known to be.
    assert "*bf16" in main.types.values()
    assert main.divisible or kernel == "norm"
    names = {request.kernel.rpartition(":")[2] for request in requests}
    if kernel == "decode":
        assert names == {"store_kv_rows", "paged_decode_split", "paged_decode_reduce"}


def test_without_a_gpu_it_says_what_it_can_not_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = KernelBenchOptions(kernel="int4", shape=["tokens=16"], tile=["N=64"], capability=90, output_json=out)
    options.check()
    assert run_kernel_bench(options) == 0
    shown = capsys.readouterr().out
    assert "not measured: without a GPU" in shown
    assert "N=64*" in shown
    results = json.loads(out.read_text())
    assert (results["mode"], results["tile"]["N"], results["tile"]["M"]) == ("on_paper", 64, 16)
    assert results["bytes"] > 4096 * 28672 // 2
    assert results["operations"] == 2 * 16 * 4096 * 28672
    [kernel] = results["kernels"]
    assert kernel["kernel"] == "_int4_product"
    assert 16 < kernel["registers"] < 256
    assert kernel["stack_bytes"] == 0
    assert kernel["programs"] > 0


@pytest.mark.slow
def test_a_tile_that_no_gpu_has_room_for_fails(capsys: pytest.CaptureFixture[str]) -> None:
    options = KernelBenchOptions(kernel="int4", tile=["N=256", "num_stages=16"], capability=90)
    assert run_kernel_bench(options) == 1
    assert "no program of _int4_product fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (CompileError("Traceback\n  …\nValueError: no such thing\n"), "does not compile: ValueError: no such thing"),
        (subprocess.TimeoutExpired("triton", 300), "not compiled within 300 s"),
    ],
)
def test_what_does_not_compile_is_reported_in_a_line(monkeypatch, error: Exception, shown: str) -> None:
    def fail(requests: Any) -> Any:
        raise error

    monkeypatch.setattr(resources, "compile_kernels", fail)
    with pytest.raises(BenchError, match=shown):
        resources_of([])


def test_programs_of_a_multiprocessor() -> None:
    # Of an H100: 65,536 registers, 228 KiB of shared memory, 64 warps.
    assert programs_that_fit(90, 4, 160, 72192) == 3
    assert programs_that_fit(90, 8, 255, 1024) == 1
    assert programs_that_fit(90, 4, 32, 0) == 16
    assert programs_that_fit(90, 4, 32, 300_000) == 0
    assert programs_that_fit(103, 4, 32, 100_000) == 2


def test_the_roofline_is_the_slower_of_memory_and_arithmetic() -> None:
    rates = Rates(copy=2e12, multiply=4e14)
    bound, by = roofline(2_000_000, 400_000, rates)
    assert (bound, by) == (pytest.approx(1e-6), "memory at 2000 GB/s")
    bound, by = roofline(2_000, 4_000_000_000, rates)
    assert (bound, by) == (pytest.approx(1e-5), "arithmetic at 400 TFLOP/s")


class SimulatedGpu:
    """A GPU that works through its queue, on a clock that it shares with the host. Seconds."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0

    def queue(self, on_gpu: float, on_host: float = 5e-6) -> None:
        """Have the host launch work that takes ``on_gpu`` once everything before it is done."""
        self.host += on_host
        self.gpu = max(self.gpu, self.host) + on_gpu

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def event(self, **_more: object) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            self.queue(0.0, 1e-6)
            event.at = self.gpu

        event.record = record
        event.elapsed_time = lambda later: (later.at - event.at) * 1e3
        return event

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.queue(cycles / 1.7e9))
        monkeypatch.setattr("time.perf_counter", lambda: self.host)
        cache = {"get_empty_cache_for_benchmark": lambda: None, "clear_cache": lambda _cache: self.queue(8e-5)}
        monkeypatch.setattr(timing.driver, "_active", SimpleNamespace(**cache))


@pytest.mark.parametrize(("kernels", "on_gpu", "on_host"), [(1, 2e-6, 3e-5), (3, 1e-6, 2e-4), (1, 5e-3, 3e-5)])
def test_a_kernel_s_time_has_no_launch_in_it(
    monkeypatch: pytest.MonkeyPatch, kernels: int, on_gpu: float, on_host: float
) -> None:
    gpu = SimulatedGpu()
    gpu.install(monkeypatch)

    def run() -> None:
        for _ in range(kernels):
            gpu.queue(on_gpu, on_host)

    times = timing.measure(SimpleNamespace(run=run), 0.1)
    assert times == pytest.approx([kernels * on_gpu] * 3, rel=1e-6)


def test_a_case_that_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    SimulatedGpu().install(monkeypatch)

    def run() -> None:
        raise RuntimeError("out of resources\nand more")

    with pytest.raises(BenchError, match=r"it does not run: out of resources$"):
        timing.measure(SimpleNamespace(run=run), 0.1)


def test_a_measurement_is_reported_with_its_interval_and_share(monkeypatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda case, seconds: Times(4e-5, 3.9e-5, 4.4e-5))
    monkeypatch.setattr(timing, "measure_rates", lambda dtype: Rates(2e12, 4e14))
    case = on_paper_case("int4")
    out = io.StringIO()
    ask = Ask({}, "symmetric", {}, torch.bfloat16)
    results = _measured(KernelBenchOptions(kernel="int4"), ask, case, Console(file=out, width=150))
    assert results["share"] == pytest.approx(case.nbytes / 2e12 / 4e-5)
    assert "median 40.00 µs, 80 % of the runs between 39.00 and 44.00 µs" in out.getvalue()
    assert f"roofline: {results['share']:.0%} of it" in out.getvalue()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"shape": ["Q=3"]}, "Q=3: write NAME=NUMBER with one of rows, context"),
        ({"shape": ["rows"]}, "the number is 1 to"),
        ({"shape": ["rows=-1"]}, "the number is 1 to"),
        ({"shape": ["rows=0"]}, "the number is 1 to"),
        ({"shape": ["heads=30"]}, "must be a multiple of kv_heads, 8"),
        ({"variant": "int9"}, "decode has plain, int8"),
        ({"kernel": "norm", "tile": ["M=16"]}, "it is fixed"),
        ({"kernel": "int4", "shape": ["inputs=100", "group=20"]}, "group=20: it must be a multiple of 32"),
        ({"kernel": "experts_up", "shape": ["chosen=9"]}, "there are 8 experts"),
        ({"capability": 9}, "as 90 for an H100"),
        ({"seconds": 0.0}, "above 0"),
    ],
)
def test_options_that_can_not_work_are_refused(fields: dict[str, Any], shown: str) -> None:
    with pytest.raises(BenchOptionsError, match=shown):
        KernelBenchOptions(**fields).check()


@pytest.mark.parametrize(
    ("kernel", "tile", "shown"),
    [
        ("int4", {"K": 24}, "power of two"),
        ("int4", {"K": 128}, "must divide 64 and the group of 128"),
        ("fp8", {"K": 256}, "must divide the blocks of 128 columns"),
        ("decode", {"block_n": 48}, "power of two"),
    ],
)
def test_tiles_that_would_give_other_results_are_refused(kernel: str, tile: dict[str, int], shown: str) -> None:
    with pytest.raises(BenchOptionsError, match=shown):
        on_paper_case(kernel, **tile)


def test_fp8_by_fp8_is_refused_for_gpus_without_it() -> None:
    ask = Ask(KERNELS["fp8"].shape, "rows-w8a8", {}, torch.bfloat16)
    with pytest.raises(BenchOptionsError, match=r"from capability 8\.9 on"):
        CASES["fp8"](ask, Place(Mode.ON_PAPER, torch.device("cpu"), 80))
