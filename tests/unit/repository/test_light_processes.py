"""What processes import: NumPy and torch take longer than all else, so that few processes should wait for them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.machine import limit

HEAVY = ("numpy", "torch", "transformers", "huggingface_hub", "fastapi", "pydantic", "gguf", "scipy")
ALLOWED = {
    "pdserve.server.cli": set(),
    "pdserve.server.supervisor": set(),
    "pdserve.server.cluster": set(),
    "pdserve.router.process": set(),
    "pdserve.disaggregation.bootstrap.server": set(),
    "pdserve.server.http_process": {"pydantic"},
    "pdserve.server.tokenizer_process": {"numpy"},
    "pdserve.detokenizer.process": {"numpy"},
    "pdserve.scheduler.process": {"numpy"},
    "pdserve.disaggregation.handover.process": {"numpy"},
    # A worker imports torch after its threads are placed.
    "pdserve.model_runner.process": {"numpy"},
    "pdserve.disaggregation.transfer.process": {"numpy"},
}


@pytest.mark.parametrize("module", ALLOWED)
def test_a_process_imports_nothing_heavy_that_it_does_not_need(module):
    code = f"import json, sys, {module}; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) <= ALLOWED[module]
