"""Products with packed weights against float64: FP8 with FP8 and with wider activations, four bits in groups.

Shapes: T tokens, O outputs, I inputs.
"""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE, INTERPRETED, there

from pdserve.model_runner.ops.packed.weights import COLUMNS, FP8Weight, Int4Weight, pack_halves
from pdserve.model_runner.ops.triton.fp8_gemm import fp8_product
from pdserve.model_runner.ops.triton.int4_gemm import int4_product

# Of the result, as a share of the product of the magnitudes: a rounding of the type, and float32's of the sum.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHAPES = [
    (1, 64, 256),
    (5, 70, 200),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((16, 33, 128), (40, 96, 384), (130, 200, 320))),
]
types = pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float16, torch.float32))],
    ids=str,
)
needs_fp8 = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability() < (8, 9), reason="this GPU multiplies no FP8"
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def check(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compare ``out`` with the product of ``x`` and ``weight``, of any float type, in float64."""
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    assert out.shape == expected.shape
    error = ((out.cpu().double() - expected).abs() / size.clamp(min=1e-9)).max().item()
    assert error <= CLOSE[out.dtype], error


def fp8_weight(outputs: int, inputs: int, rows: int, *, is_blocked: bool, eight: bool) -> FP8Weight:
    values = (100 * torch.randn(outputs, inputs)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-inputs // COLUMNS) if is_blocked else 1, -(-outputs // rows)) + 0.01
    scales /= 448
    return FP8Weight(values, scales, rows, is_blocked, eight)


def moved(weight: FP8Weight | Int4Weight) -> FP8Weight | Int4Weight:
    parts = {name: getattr(weight, name) for name in weight.__dataclass_fields__}
    return type(weight)(**{k: there(v) if isinstance(v, torch.Tensor) else v for k, v in parts.items()})


def inputs_of(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Activations, columns of which differ in size, and a bias for an odd number of tokens."""
    x = (torch.randn(tokens, inputs) * torch.logspace(-2, 2, inputs)[torch.randperm(inputs)]).to(dtype)
    return x, torch.randn(outputs).to(dtype) if tokens % 2 else None


def fp8_of(x: torch.Tensor, is_blocked: bool) -> torch.Tensor:
    """Round ``x`` to FP8 and back, with a scale a token or a block of it: float64."""
    parts = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % COLUMNS)) if is_blocked else x.float()
    parts = parts.view(len(x), -1, COLUMNS if is_blocked else x.shape[1])
    largest = parts.abs().amax(-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, 448.0))
    return ((parts / scales).to(torch.float8_e4m3fn).double() * scales.double()).flatten(1)[:, : x.shape[1]]


@types
@needs_fp8
@pytest.mark.parametrize(("rows", "is_blocked"), [(1, False), (128, True), (1, True)])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_fp8_by_fp8(dtype: torch.dtype, tokens: int, outputs: int, inputs: int, rows: int, is_blocked: bool) -> None:
    weight = fp8_weight(outputs, inputs, rows, is_blocked=is_blocked, eight=True)
    x, bias = inputs_of(tokens, inputs, outputs, dtype)
    out = fp8_product(there(x), moved(weight), None if bias is None else there(bias))
    check(out, fp8_of(x, is_blocked), weight.dequantise(), bias)


@types
@pytest.mark.parametrize(("rows", "is_blocked"), [(1, False), (128, True)])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_fp8_by_wider_ones(dtype, tokens: int, outputs: int, inputs: int, rows: int, is_blocked: bool) -> None:
    """The weight is rounded as where it is dequantised: what is left is the sum's and the result's rounding."""
    weight = fp8_weight(outputs, inputs, rows, is_blocked=is_blocked, eight=False)
    x, bias = inputs_of(tokens, inputs, outputs, dtype)
    out = fp8_product(there(x), moved(weight), None if bias is None else there(bias))
    check(out, x, weight.dequantise().to(dtype), bias)
    # One input at a time shows each weight as it is.
    column = torch.zeros(1, inputs, dtype=dtype)
    column[0, inputs - 3] = 1
    assert torch.equal(fp8_product(there(column), moved(weight)).cpu()[0], weight.dequantise()[:, -3].to(dtype))


@types
@pytest.mark.parametrize(
    ("group", "symmetric"),
    [(128, False), (32, True), *(pytest.param(64, s, marks=pytest.mark.slow) for s in (True, False))],
)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_four_bits(dtype, tokens: int, outputs: int, inputs: int, group: int, symmetric: bool) -> None:
    inputs = -(-inputs // group) * group
    groups = inputs // group
    numbers, zeros = torch.randint(0, 16, (outputs, inputs)), torch.randint(0, 17, (groups, outputs), dtype=torch.uint8)
    scales = (torch.rand(groups, outputs) + 0.01).half()
    weight = Int4Weight(pack_halves(numbers), scales, None if symmetric else zeros, inputs, group)
    exact = (
        numbers - (8 if symmetric else zeros.T.int().repeat_interleave(group, 1))
    ) * scales.T.float().repeat_interleave(group, 1)
    assert torch.equal(weight.dequantise(), exact)
    x, bias = inputs_of(tokens, inputs, outputs, dtype)
    out = int4_product(there(x), moved(weight), None if bias is None else there(bias))
    check(out, x, exact.to(dtype), bias)
    column = torch.zeros(1, inputs, dtype=dtype)
    column[0, inputs - 3] = 1
    assert torch.equal(int4_product(there(column), moved(weight)).cpu()[0], exact[:, -3].to(dtype))


def test_nan_in_a_result_stays_nan_whatever_its_bits() -> None:
    bias = there(torch.tensor([0x7FFFFFFF, -1, 0], dtype=torch.int32).view(torch.float32).repeat(64)[:64])
    x = there(torch.ones(1, 128, dtype=torch.bfloat16))
    eight = moved(fp8_weight(64, 128, 1, is_blocked=False, eight=False))
    four = moved(Int4Weight(pack_halves(torch.randint(0, 16, (64, 128))), torch.rand(1, 64), None, 128, 128))
    for product, weight in ((fp8_product, eight), (int4_product, four)):
        assert torch.equal(product(x, weight, bias)[0].isnan(), bias.isnan())


def test_no_tokens_are_no_work_and_rows_may_lie_apart() -> None:
    weight = moved(fp8_weight(64, 128, 1, is_blocked=False, eight=False))
    assert fp8_product(torch.empty(0, 128, dtype=torch.bfloat16, device=DEVICE), weight).shape == (0, 64)
    four = moved(Int4Weight(pack_halves(torch.randint(0, 16, (64, 128))), torch.rand(1, 64), None, 128, 128))
    assert int4_product(torch.empty(0, 128, dtype=torch.bfloat16, device=DEVICE), four).shape == (0, 64)
    x = torch.randn(3, 200).to(torch.bfloat16)
    for product, packed in ((fp8_product, weight), (int4_product, four)):
        apart, together = there(x)[:, :128], there(x[:, :128])
        assert torch.equal(product(apart, packed), product(together, packed))
