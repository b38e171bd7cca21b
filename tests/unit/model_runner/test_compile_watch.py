"""A kernel that is compiled while serving is logged, told with the next result, and fails gpu-check."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from support.scrape import metrics_of
from support.sim import SimInstance

from pdserve.messages.base import pack_i32
from pdserve.messages.worker import StepResult
from pdserve.model_files.spec import Activation
from pdserve.model_runner.device.compile_watch import CompileWatch
from pdserve.model_runner.process import _result
from tools.gpu_check.record import Finding
from tools.gpu_check.token_checks import without_compiles


def test_what_triton_compiles_is_logged_with_kernel_and_variant(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    from support.kernel_variants import variants_asked_for
    from triton import knobs

    from pdserve.model_runner.ops.triton.activations import gate_and_mul

    watch = CompileWatch()
    with variants_asked_for(), caplog.at_level(logging.WARNING):
        # Triton calls this hook as it calls the one behind a compilation, of which a machine without a GPU has none.
        knobs.runtime.jit_cache_hook = lambda **launch: bool(watch.note(**launch)) or True
        gate_and_mul(torch.zeros(2, 8), Activation.SILU)
    assert [record.message for record in caplog.records if "_gate_and_mul was compiled while serving" in record.message]
    assert "('*fp32', 'D')" in caplog.text
    assert (watch.take(), watch.take()) == (1, 0)


def test_only_a_gpu_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    watch = CompileWatch()
    watch.begin("cpu")
    assert knobs.runtime.jit_post_compile_hook is None
    watch.begin("cuda")
    assert knobs.runtime.jit_post_compile_hook == watch.note


def test_the_next_result_tells_and_the_scheduler_counts() -> None:
    sim = SimInstance()
    sim.submit("a", range(4), max_new_tokens=2)
    watch = CompileWatch()
    steps = SimpleNamespace(collect=lambda: StepResult(0, b"", 1.0))
    watch.note(key="key", fn=SimpleNamespace(name="kernel"))
    assert [_result(SimpleNamespace(steps=steps, compiles=watch)).compiled_kernels for _ in range(2)] == [1, 0]
    sim.plan()
    step = sim.to_worker.messages.popleft()
    sim.scheduler.on_step_result(StepResult(step.step_id, pack_i32([1]), 1.0, compiled_kernels=3), sim.now)
    assert metrics_of(sim.scheduler).total("pdserve_compiled_kernels_total") == 3
    assert sim.scheduler.counters.info()["compiled_kernels"] == 3


@pytest.mark.parametrize(("compiled", "ok"), [(0, True), (2, False)])
def test_a_server_that_compiles_while_serving_fails_the_check(compiled: int, ok: bool) -> None:
    found = without_compiles(Finding("", "24 of 24 the same (triton)", "the same tokens", True), compiled)
    assert found.ok is ok
    assert found.asked == "the same tokens, no kernel compiled while serving"
    assert ("2 kernels compiled while serving" in found.figure) is not ok
    assert without_compiles(Finding("", "", "", False), 0).ok is False
