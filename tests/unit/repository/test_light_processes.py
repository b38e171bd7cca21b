"""What processes import: NumPy and torch take longer than all else, so that few processes should wait for them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.machine import limit

HEAVY = ("numpy", "torch", "transformers", "huggingface_hub", "fastapi", "pydantic", "gguf", "scipy")
MODULES = {
    (): (
        "pdserve.server.cli",
        "pdserve.server.supervisor",
        "pdserve.server.cluster",
        "pdserve.router.process",
        "pdserve.disaggregation.bootstrap.server",
    ),
    ("pydantic",): ("pdserve.server.http_process",),
    # A worker imports what its engine needs after its threads are placed.
    ("numpy",): (
        "pdserve.server.tokenizer_process",
        "pdserve.detokenizer.process",
        "pdserve.scheduler.process",
        "pdserve.disaggregation.handover.process",
        "pdserve.model_runner.process",
        "pdserve.disaggregation.transfer.process",
        # Imports the readers of weights when it knows that there is something to pack.
        "pdserve.model_runner.weights_cache.build_process",
    ),
}
"""Modules by what they may import. What one of them imports is loaded for the next ones: one process shows all."""


@pytest.mark.parametrize("allowed", MODULES)
def test_a_process_imports_nothing_heavy_that_it_does_not_need(allowed):
    code = (
        "import importlib, json, sys\n"
        f"for module in {MODULES[allowed]}:\n"
        "    importlib.import_module(module)\n"
        f"    print(json.dumps([module, [name for name in {HEAVY} if name in sys.modules]]))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert found.keys() == set(MODULES[allowed])
    assert [module for module, loaded in found.items() if set(loaded) - set(allowed)] == []


CPP_WORKER = (
    "disaggregation.transfer.engine",
    "disaggregation.transfer.process",
    "model_runner.engines.cpu",
    "model_runner.engines.load",
    "model_runner.engines.memory_table",
    "model_runner.engines.pool_maker",
    "model_runner.kv.page_groups",
    "model_runner.kv.pool_hasher",
    "model_runner.memory_saver",
    "model_runner.profiler",
    "model_runner.rank_process",
    "model_runner.ranks.host_ranks",
    "model_runner.ranks.leading_steps",
    "model_runner.ranks.rank_parts",
    "model_runner.sampling.native",
    "model_runner.steps.host_executor",
    "model_runner.steps.measure_steps",
    "model_runner.steps.step_queue",
    "model_runner.steps.warm_up",
    "model_runner.tiers.worker_tiers",
)
"""What a worker of the C++ engine imports as it loads and serves."""


def test_a_worker_of_the_cpp_engine_imports_no_torch() -> None:
    names = ", ".join(f"pdserve.{module}" for module in CPP_WORKER)
    code = f"import sys, {names}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
