"""What the CPU engine does when memory runs out, or when it is asked for what no memory can hold.

Each case runs in a process of its own, with a limited address space: a mistake would end it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.machine import limit

from pdserve.model_files.spec import ExpertsSpec, MLPSpec
from pdserve.model_runner.cpu_engine.build import levels_here

pytestmark = pytest.mark.skipif(not levels_here(), reason="this processor can't run the kernels")

MIB = 1 << 20
TOKENS = 8192
"""Tokens of a pass that takes some 300 MiB of activations."""
NETWORKS = {"dense": MLPSpec(inner=64), "experts": ExpertsSpec(count=2, chosen=1, inner=64)}


def run_alone(case: Callable[..., None], *args: str) -> None:
    """Call ``case``, of this file, in a process of its own."""
    call = f"from {__name__} import {case.__name__}; {case.__name__}(*{args!r})"
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[3]), *sys.path]!r}; {call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(100), check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), f"exit {done.returncode}: {done.stderr[:4000]}"


@pytest.mark.parametrize("network", ["dense", pytest.param("experts", marks=pytest.mark.slow)])
def test_after_a_pass_without_memory_the_engine_computes_as_before(network: str) -> None:
    run_alone(meet_the_limit, network)


def meet_the_limit(network: str) -> None:
    """Let passes fail at one allocation after another."""
    import torch

    from tests.unit.model_runner import test_kernels_layers as rig

    rig.CONTEXT, rig.ROWS = TOKENS + 2 * rig.PAGE, 1
    layer = replace(rig.LAYER, mlp=NETWORKS[network])
    engine = rig.Engine(rig.make_model(rig.make_spec(layer, hidden_size=2048), torch.float32), 2)
    small, large = [(0, 0, 9)], [(0, 9, TOKENS)]
    expected = list(engine.run(small).values())
    failures = 0
    # Less than the smallest of its activations, up to all but the last ones.
    for room in range(40 * MIB, 240 * MIB, 32 * MIB):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
        try:
            engine.run(large)
        except MemoryError as e:
            failures += f"no memory for a pass of {TOKENS} tokens" in str(e)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for found, logits in zip(engine.run(small).values(), expected, strict=True):
            assert torch.equal(found, logits)
    assert failures >= 3, failures
    print("done")


def test_a_size_that_no_vector_has_is_a_memory_error() -> None:
    run_alone(ask_too_much)


def ask_too_much() -> None:
    """Ask for an engine of a number of layers that makes C++ throw something else than ``bad_alloc``."""
    import ctypes

    from pdserve.model_runner.cpu_engine.library import load_library
    from pdserve.model_runner.cpu_engine.structs import LayerOps, ModelOps

    model, layers = ModelOps(), (LayerOps * 2)()
    model.layers = -1
    # The second one, so that the end of the range that this makes lies in the array as well.
    assert load_library().pds_engine_new(model, ctypes.byref(layers[1]), None, None, 0, None, None) is None
    print("done")
