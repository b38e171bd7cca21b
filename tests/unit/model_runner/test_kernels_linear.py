"""Single CPU kernels against float64: dense and quantised products, norms, rotation, activations.

Each is tested on chosen sizes around the widths of its blocks, and then on random sizes, values and strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor

from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import ActivationDType, FetchHint, fetch_hint, load_library, set_fetch_hint
from pdserve.model_runner.cpu_engine.single_kernels import Function, PackedWeight, apply, rms_norm, rope
from pdserve.model_runner.loader.quantized_blocks import FORMATS
from pdserve.model_runner.loader.random_blocks import HALVES, random_blocks

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

# A bfloat16 product is exact in float32, so what remains is the rounding of K additions, in either type.
SUM_TOLERANCE = 2e-6
BF16_STEP = 2.0**-7
ROWS = (1, 2, 3, 7, 8, 11, 12, 13, 24, 25, 37)
SHAPES = ((32, 2), (33, 64), (96, 576), (1, 34), (160, 130))
DTYPES = (torch.float32, torch.bfloat16)


def random_rows(seed: int, rows: int, width: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw [rows, width], each row ``gap`` elements after the one before it, of its own size and off zero."""
    generator = torch.Generator().manual_seed(seed)
    scale, offset = (torch.randn(rows, 1, generator=generator) for _ in range(2))
    x = (torch.randn(rows, gap + width, generator=generator) + offset) * (4 * scale).exp()
    return x.to(dtype)[:, gap:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dense(n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    packed = PackedWeight(weight, n, k, dtype)
    for rows in ROWS:
        # A stride wider than the row, as in a fused buffer.
        a = torch.randn(rows, k + 6, generator=generator).to(dtype)[:, :k]
        expected = a.double() @ weight.double().T
        magnitude = a.double().abs() @ weight.double().abs().T
        assert ((packed.multiply(a).double() - expected).abs() <= SUM_TOLERANCE * magnitude + 1e-30).all(), rows


@given(
    st.integers(0, 2**32),
    st.sampled_from(DTYPES),
    st.integers(1, 150),
    st.integers(1, 400),
    st.integers(1, 60),
    st.integers(0, 40),
)
@settings(max_examples=examples(80), deadline=None)
def test_dense_of_random_sizes_and_strides(
    seed: int, dtype: torch.dtype, n: int, half_k: int, rows: int, gap: int
) -> None:
    k = 2 * half_k
    weight, a = random_rows(seed, n, k, 0, dtype), random_rows(seed + 1, rows, k, gap, dtype)
    difference = PackedWeight(weight, n, k, dtype).multiply(a).double() - a.double() @ weight.double().T
    magnitude = a.double().abs() @ weight.double().abs().T
    assert (difference.abs() <= SUM_TOLERANCE * magnitude + 1e-30).all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("activations", ActivationDType)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(FORMATS))
@pytest.mark.parametrize(("n", "blocks_of_k"), [(32, 1), (33, 2), (96, 3), (80, 18)])
def test_quantised(
    n: int, blocks_of_k: int, kind: GGMLQuantizationType, dtype: torch.dtype, activations: ActivationDType
) -> None:
    k = blocks_of_k * gguf.GGML_QUANT_SIZES[kind][0]
    generator = torch.Generator().manual_seed(n * k)
    blocks = random_blocks(kind, n, k, np.random.default_rng(n * k))
    weight = torch.from_numpy(gguf.dequantize(blocks, kind)).double()
    packed = PackedWeight(blocks, n, k, dtype, FORMATS[kind])
    for rows in ROWS:
        a = torch.randn(rows, k, generator=generator).to(dtype)
        rounded = round_activations(a.double(), activations)
        ours = packed.multiply(a, activations).double()
        # Activations are rounded as the kernel says it does; beyond that, only additions may differ.
        assert ((ours - rounded @ weight.T).abs() <= SUM_TOLERANCE * magnitude_of(rounded, weight)).all(), rows
        # And that rounding is by half a 127th of a run's largest at most, or by 2^-16 of it, in either direction.
        exact = a.double() @ weight.T
        limit = 1e-4 if activations == ActivationDType.INT16 else 0.01
        assert (ours - exact).norm() <= limit * a.double().norm() * weight.norm() / n**0.5, rows


@pytest.mark.parametrize("kind", list(FORMATS))
def test_16_bit_activations_are_nearly_exact(kind: GGMLQuantizationType) -> None:
    """Against float64, with an outlier in each run, as models have them; activations of 8 bits are far from it."""
    n, k, rows = 64, 512, 13
    blocks = random_blocks(kind, n, k, np.random.default_rng(4))
    weight = torch.from_numpy(gguf.dequantize(blocks, kind)).double()
    packed = PackedWeight(blocks, n, k, torch.bfloat16, FORMATS[kind])
    a = torch.randn(rows, k, generator=torch.Generator().manual_seed(4))
    a[:, ::32] *= 20
    a = a.bfloat16()
    exact = a.double() @ weight.T
    of_16, of_8 = (
        float((packed.multiply(a, dtype).double() - exact).norm() / exact.norm()) for dtype in ActivationDType
    )
    assert of_16 < 5e-5
    assert of_8 > 20 * 5e-5


@given(
    st.integers(0, 2**32),
    st.sampled_from(DTYPES),
    st.sampled_from(ActivationDType),
    st.sampled_from(list(FORMATS)),
    st.integers(1, 100),
    st.integers(1, 16),
    st.integers(1, 40),
    st.integers(0, 40),
)
@settings(max_examples=examples(150), deadline=None)
def test_quantised_of_random_sizes_and_strides(
    seed: int,
    dtype: torch.dtype,
    activations: ActivationDType,
    kind: GGMLQuantizationType,
    n: int,
    runs: int,
    rows: int,
    gap: int,
) -> None:
    k = -(-32 * runs // gguf.GGML_QUANT_SIZES[kind][0]) * gguf.GGML_QUANT_SIZES[kind][0]
    blocks = random_blocks(kind, n, k, np.random.default_rng(seed), 2.0 ** (seed % 12 - 6))
    weight = torch.from_numpy(gguf.dequantize(blocks, kind)).double()
    a = random_rows(seed, rows, k, gap, dtype)
    rounded = round_activations(a.double(), activations)
    ours = PackedWeight(blocks, n, k, dtype, FORMATS[kind]).multiply(a, activations).double()
    difference = ours - rounded @ weight.T
    assert (difference.abs() <= SUM_TOLERANCE * magnitude_of(rounded, weight)).all()


def magnitude_of(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the magnitude that the rounding of sums is in proportion to. With minima it exceeds that of
    the weights.
    """
    return a.abs() @ weight.abs().T + a.abs().sum(-1, keepdim=True) * weight.abs().max()


@pytest.mark.parametrize("activations", ActivationDType)
@pytest.mark.parametrize("kind", list(FORMATS))
def test_the_largest_numbers_do_not_overflow(kind: GGMLQuantizationType, activations: ActivationDType) -> None:
    """Every bit of the numbers set, or none, and activations of one size: whole sums are as large as they can be."""
    k, size = 512, 4 - 2**-22  # rounded to 16 bits, it would be the next power of two
    for byte in (0, 255):
        blocks = random_blocks(kind, 64, k, np.random.default_rng(1))
        kept = [at + i for at in HALVES[kind].at for i in range(2)]
        view = blocks.reshape(64, -1, gguf.GGML_QUANT_SIZES[kind][1])
        scales = view[..., kept].copy()
        view[...] = byte
        view[..., kept] = scales
        weight = torch.from_numpy(gguf.dequantize(blocks, kind)).double()
        a = torch.full((3, k), -size)
        a[1] = size
        a[2, ::3] = size
        ours = PackedWeight(blocks, 64, k, torch.float32, FORMATS[kind]).multiply(a, activations).double()
        rounded = round_activations(a.double(), activations)
        assert ((ours - rounded @ weight.T).abs() <= SUM_TOLERANCE * magnitude_of(rounded, weight)).all(), byte


@pytest.mark.sample(3)
@pytest.mark.parametrize("activations", ActivationDType)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(FORMATS))
def test_what_is_not_finite_stays_visible(
    kind: GGMLQuantizationType, dtype: torch.dtype, bad: float, activations: ActivationDType
) -> None:
    """In every column of its row, and in no other row: the server ends that request and no other."""
    n, k = 48, 512
    packed = PackedWeight(random_blocks(kind, n, k, np.random.default_rng(2)), n, k, dtype, FORMATS[kind])
    for at in (0, 15, 16, 31, 300, k - 1):
        # Beside zeros as well, where nothing else would be left of it.
        for a in (torch.randn(14, k).to(dtype), torch.zeros(14, k).to(dtype)):
            fine = packed.multiply(a, activations)
            a[5, at] = bad
            ours = packed.multiply(a, activations)
            assert ours[5].isnan().all(), at
            others = torch.arange(14) != 5
            assert torch.equal(ours[others], fine[others])


@pytest.mark.parametrize("activations", ActivationDType)
def test_activations_too_small_to_round_are_zeros(activations: ActivationDType) -> None:
    kind = GGMLQuantizationType.Q4_1
    packed = PackedWeight(random_blocks(kind, 32, 64, np.random.default_rng(3)), 32, 64, torch.float32, FORMATS[kind])
    assert packed.multiply(torch.full((1, 64), 1e-38), activations).abs().max() < 1e-30


def round_activations(a: torch.Tensor, activations: ActivationDType) -> torch.Tensor:
    """Round activations by runs of 32, ties to even, in float32 like the kernel, so that no tie falls the other way.

    A Python number over a tensor would be its reciprocal times the number.
    """
    runs = a.float().view(a.shape[0], -1, 32)
    amax = runs.abs().amax(-1, keepdim=True)
    if activations == ActivationDType.INT16:
        scale = torch.ldexp(torch.ones_like(amax), torch.frexp(amax).exponent - 15)
        return ((runs / scale).round().clamp(-32767, 32767).double() * scale.double()).view(a.shape)
    return ((runs * (torch.tensor(127.0) / amax)).round().double() * (amax / 127.0).double()).view(a.shape)


def random_weight(kind: GGMLQuantizationType | None, n: int, k: int, dtype: torch.dtype) -> PackedWeight:
    """Dense without a ``kind``."""
    if kind is None:
        return PackedWeight(torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype), n, k, dtype)
    return PackedWeight(random_blocks(kind, n, k, np.random.default_rng(n)), n, k, dtype, FORMATS[kind])


@pytest.fixture
def restored_hint() -> Iterator[None]:
    before = fetch_hint()
    yield
    set_fetch_hint(before)


@pytest.mark.usefixtures("restored_hint")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, *FORMATS])
def test_fetch_hints_give_the_same_bits(kind: GGMLQuantizationType | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    n, k = 96, 768
    packed = random_weight(kind, n, k, dtype)
    a = torch.randn(max(ROWS), k, generator=generator).to(dtype)
    results = []
    for hint in FetchHint:
        set_fetch_hint(hint)
        assert fetch_hint() == hint
        # Every number of rows: each has code of its own, for each hint.
        results.append([packed.multiply(a[:rows]) for rows in range(1, len(a) + 1)])
    for ours, other in zip(*results, strict=True):
        assert ours.any()
        assert torch.equal(ours, other)


def test_the_fetch_hint_is_the_processors_own() -> None:
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    assert fetch_hint() == (FetchHint.NON_TEMPORAL if amd else FetchHint.ALL_CACHES)


@pytest.mark.sample(2)
@pytest.mark.parametrize("activations", ActivationDType)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, *FORMATS])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kind: GGMLQuantizationType | None, dtype: torch.dtype, activations: ActivationDType
) -> None:
    generator = torch.Generator().manual_seed(3)
    n, k = 64, 512
    packed = random_weight(kind, n, k, dtype)
    a = torch.randn(200, k, generator=generator).to(dtype)
    alone = torch.cat([packed.multiply(row[None], activations) for row in a])
    # Every size of a block, and more rows than a thread takes past a panel at once.
    for rows in (*range(2, 15), 25, 31, 40, 96, 97, 200):
        assert torch.equal(packed.multiply(a[:rows], activations), alone[:rows]), rows


def test_zero_activations_give_zero() -> None:
    blocks = gguf.quantize(np.ones((32, 32), dtype=np.float32), GGMLQuantizationType.Q4_1)
    packed = PackedWeight(blocks, 32, 32, torch.float32, FORMATS[GGMLQuantizationType.Q4_1])
    assert not packed.multiply(torch.zeros(2, 32)).any()


@pytest.mark.parametrize("n", [1, 15, 16, 48, 576, 577])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    x, weight = torch.randn(5, n, generator=generator).to(dtype), torch.randn(n, generator=generator)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    step = BF16_STEP / 2 if dtype == torch.bfloat16 else 1e-6
    assert ((rms_norm(x, weight, 1e-5).double() - exact).abs() <= 1.01 * step * exact.abs() + 1e-9).all()


@given(
    st.integers(0, 2**32),
    st.sampled_from(DTYPES),
    st.integers(1, 1200),
    st.integers(0, 20),
    st.sampled_from([1e-6, 1e-5, 0.1]),
)
@settings(max_examples=examples(60), deadline=None)
def test_rms_norm_of_random_sizes_at_any_place(seed: int, dtype: torch.dtype, n: int, gap: int, eps: float) -> None:
    """Rows one by one, from wherever they lie in a wider buffer."""
    x, weight = random_rows(seed, 4, n, gap, dtype), random_rows(seed + 1, 1, n, gap, torch.float32)[0]
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    ours = torch.cat([rms_norm(row[None], weight, eps) for row in x]).double()
    step = BF16_STEP / 2 if dtype == torch.bfloat16 else 1e-6
    assert ((ours - exact).abs() <= 1.01 * step * exact.abs() + 1e-30).all()


@pytest.mark.parametrize("dim", [2, 16, 32, 48, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    heads, angles = torch.randn(3, dim, generator=generator).to(dtype), torch.randn(dim // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    a, b = heads.double().chunk(2, -1)
    exact = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    step = BF16_STEP / 2 if dtype == torch.bfloat16 else 1e-6
    assert ((rope(heads, cos, sin).double() - exact).abs() <= 1.01 * step * exact.abs() + 1e-6).all()


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(1, 160), st.integers(1, 12), st.integers(0, 20))
@settings(max_examples=examples(60), deadline=None)
def test_rope_of_random_sizes_at_any_place(seed: int, dtype: torch.dtype, half: int, heads: int, gap: int) -> None:
    x = random_rows(seed, heads, 2 * half, 0, dtype)
    angles = random_rows(seed + 1, 1, half, gap, torch.float32)[0]
    # Places in a table of several positions, as the engine finds them.
    cos, sin = (torch.cat((torch.full((gap,), torch.nan), part))[gap:] for part in (angles.cos(), angles.sin()))
    a, b = x.double().chunk(2, -1)
    exact = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    magnitude = torch.cat(((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs()), -1)
    # Two products may cancel: their own rounding is of their size, that of the result of its size.
    step = BF16_STEP / 2 if dtype == torch.bfloat16 else 0.0
    assert ((rope(x, cos, sin).double() - exact).abs() <= 1.01 * step * exact.abs() + 2e-7 * magnitude).all()


# Each in float64, without differences of near numbers, and the tolerance of float32. A power multiplies the rounding of
# its argument.
FUNCTIONS: dict[Function, tuple[Callable[[Tensor], Tensor], float]] = {
    Function.SILU: (lambda x: x * torch.sigmoid(x), 1e-6),
    Function.GELU: (lambda x: x / 2 * torch.special.erfc(-x / math.sqrt(2)), 1e-6),
    Function.GELU_TANH: (lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)), 1e-6),
    Function.TANH: (torch.tanh, 1e-6),
}


def assert_exact(function: Function, x: Tensor) -> None:
    exact_of, near = FUNCTIONS[function]
    exact = exact_of(x.double())
    power = 1 + x.double().abs() ** 3 / 8 if function == Function.GELU_TANH else 1
    assert ((apply(function, x).double() - exact).abs() <= near * power * exact.abs() + 1e-35).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(0, 20), st.sampled_from([1e-20, 1e-3, 1.0, 30.0]))
@settings(max_examples=examples(60), deadline=None)
def test_functions_of_random_sizes_at_any_place(
    function: Function, seed: int, vectors: int, gap: int, scale: float
) -> None:
    assert_exact(function, random_rows(seed, 1, 16 * vectors, gap, torch.float32)[0].clamp(-30, 30) * scale)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function: Function) -> None:
    assert_exact(function, torch.cat((torch.linspace(-120, 120, 4000), torch.linspace(-9, 9, 4000), torch.randn(96))))
    ends = torch.tensor([0.0, -0.0, 1e4, -1e4, 1e30, -1e30, *[0.0] * 10])
    torch.testing.assert_close(
        apply(function, ends), FUNCTIONS[function][0](ends.double()).float(), atol=1e-8, rtol=1e-6
    )
    assert apply(function, torch.full((16,), torch.nan)).isnan().all()
