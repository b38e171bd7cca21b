"""The torch kernels, which other kernels are tested against, themselves against float64: random sizes and strides.

A step is the distance of a type's numbers, relative: a result that is rounded once is off by half a step. What torch
rounds in between counts as well; products are added up in float32 at the least.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.model_files.spec import Activation
from pdserve.model_runner.ops.reference import gate_and_mul, linear, rms_norm, rope, store_kv

STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Below the normal numbers, which float16 gets to easily, steps do not shrink any more.
SMALLEST = {dtype: step * torch.finfo(dtype).smallest_normal for dtype, step in STEP.items()}
SUM_TOLERANCE = 2e-6
# What a few operations in float32 are off by, exponential and root among them; relative.
FEW_OPERATIONS = 1e-6
Make = Callable[..., Tensor]


@st.composite
def makers(draw: st.DrawFn) -> Make:
    """Makes random tensors of one type, each a view of wider rows with a gap of its own, or of a transposed tensor."""
    dtype = draw(st.sampled_from(list(STEP)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    gaps = draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))
    turned = draw(st.booleans())

    def make(*shape: int) -> Tensor:
        gap = gaps[int(torch.randint(3, (), generator=generator))]
        if turned and len(shape) == 2:
            return torch.randn(shape[1] + gap, shape[0], generator=generator).to(dtype).T[:, gap:]
        return torch.randn(*shape[:-1], shape[-1] + gap, generator=generator).to(dtype)[..., gap:]

    return make


@given(makers(), st.integers(1, 40), st.integers(1, 90), st.integers(1, 600), st.booleans())
@settings(max_examples=60, deadline=None)
def test_linear(make: Make, rows: int, n: int, k: int, biased: bool) -> None:
    x, weight, bias = make(rows, k), make(n, k), make(1, n)[0] if biased else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T + 1
    close(linear(x, weight, bias), exact, 0.51 * STEP[x.dtype] * exact.abs() + SUM_TOLERANCE * magnitude)


@given(makers(), st.integers(1, 9), st.integers(1, 1200), st.sampled_from([1e-6, 1e-5, 0.1]))
@settings(max_examples=60, deadline=None)
def test_rms_norm(make: Make, rows: int, n: int, eps: float) -> None:
    x, weight = make(rows, n), make(1, n)[0]
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    # Two results are rounded: the normalised row, and its product with the weight.
    close(rms_norm(x, weight, eps), exact, (1.05 * STEP[x.dtype] + FEW_OPERATIONS) * exact.abs() + SMALLEST[x.dtype])


@given(makers(), st.integers(1, 9), st.integers(1, 5), st.integers(1, 80))
@settings(max_examples=60, deadline=None)
def test_rope(make: Make, tokens: int, heads: int, half: int) -> None:
    x, cos, sin = make(tokens, heads, 2 * half), make(tokens, half), make(tokens, half)
    a, b = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    exact = torch.cat((a * c - b * s, b * c + a * s), -1)
    magnitude = torch.cat(((a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs()), -1)
    rotated = rope(x, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    # Either product may be rounded before they are added.
    close(rotated, exact, 0.51 * STEP[x.dtype] * (exact.abs() + magnitude) + 2 * SMALLEST[x.dtype])


@given(makers(), st.integers(1, 9), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_silu_and_mul(make: Make, rows: int, inner: int) -> None:
    x = make(rows, 2 * inner) * 4
    before = x.clone()
    gate, up = x.double().chunk(2, -1)
    exact = gate * gate.sigmoid() * up
    # silu and the product are both rounded, and either may be too small to be normal.
    smallest = SMALLEST[x.dtype] * (1 + up.abs())
    close(gate_and_mul(x, Activation.SILU), exact, (1.05 * STEP[x.dtype] + FEW_OPERATIONS) * exact.abs() + smallest)
    assert torch.equal(x, before)


@given(makers(), st.sampled_from(list(STEP)), st.integers(1, 9), st.integers(1, 4), st.integers(1, 33))
@settings(max_examples=60, deadline=None)
def test_store_kv(make: Make, pool_dtype: torch.dtype, tokens: int, heads: int, dim: int) -> None:
    """Exact: each value is rounded once to the nearest, as torch converts from float64; the other rows stay."""
    k, v = make(tokens, heads, dim), make(tokens, heads, dim)
    pool = torch.randn(2 * tokens + 5, heads * dim).to(pool_dtype)
    expected, rows = pool.clone(), torch.randperm(len(pool))
    keys, values = rows[:tokens], rows[tokens : 2 * tokens]
    expected[keys], expected[values] = (x.double().to(pool_dtype).flatten(1) for x in (k, v))
    store_kv(pool, keys, values, k, v)
    assert torch.equal(pool, expected)


def close(actual: Tensor, exact: Tensor, tolerance: Tensor) -> None:
    """Assert that ``actual`` is within ``tolerance`` of ``exact``, element by element."""
    assert actual.shape == exact.shape
    excess = (actual.double() - exact).abs() / tolerance
    assert excess.max() <= 1, f"{excess.max():.2f} times the tolerance at {excess.argmax()}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tolerances_notice_a_step(dtype: torch.dtype) -> None:
    x = torch.ones(3, 8, dtype=dtype)
    with pytest.raises(AssertionError, match="times"):
        close(x * (1 + STEP[dtype]), x.double(), 0.51 * STEP[dtype] * x.double())
