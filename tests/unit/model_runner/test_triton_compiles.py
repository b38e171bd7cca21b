"""A sample of Triton's kernels, compiled for GPUs that are not here, in one process for all of them.

The process imports torch and Triton, which takes as long as to compile a few kernels.
"""

from __future__ import annotations

import pytest

from pdserve.model_runner.device.triton_compiler import Compiled, compile_kernels
from tests.unit.model_runner import test_triton_attention as attention
from tests.unit.model_runner import test_triton_ops as ops


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    """Return what the two samples compile to, those of attention first."""
    return compile_kernels([*attention.sample(), *ops.sample()])


def test_a_sample_of_attention_compiles_without_spills(compiled: list[Compiled]) -> None:
    """The compiler must find by itself copies of 16 bytes that run ahead, and the tensor cores."""
    found = compiled[: len(attention.sample())]
    attention.check_compiled(attention.sample(), found)
    on_80, on_90, latent = found
    for kernel in (on_80, on_90, latent):
        assert kernel.count("cp.async.cg.shared.global")
        assert kernel.count("cp.async.wait_group")
    assert on_80.count("mma.sync")
    assert on_90.count("wgmma.mma_async")
    # Two buffers of keys and of values: while one is computed, the other is on its way.
    assert on_80.shared_bytes >= 2 * 2 * 64 * 128 * 2


def test_a_sample_of_operations_compiles_without_spills(compiled: list[Compiled]) -> None:
    ops.check_compiled(ops.sample(), compiled[len(attention.sample()) :])
