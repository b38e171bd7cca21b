"""Kernels of a layer against the torch reference: norms, rotation, activations, experts, FP8.

Shapes: T tokens, N elements, H heads of D, C experts of a token.
"""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE, INTERPRETED, there

from pdserve.model_files.spec import Activation, NormSpec, Pairing
from pdserve.model_runner.ops import reference
from pdserve.model_runner.ops.triton.activations import gate_and_mul
from pdserve.model_runner.ops.triton.grouped_gemm import (
    ExpertWeights,
    combine,
    experts_down,
    experts_up,
    make_blocks,
    sort_pairs,
)
from pdserve.model_runner.ops.triton.norms import add_and_norm, head_norm, rms_norm
from pdserve.model_runner.ops.triton.quantise import find_scale, quantise_blocks, quantise_tensor, quantise_tokens
from pdserve.model_runner.ops.triton.rope import rope_table, rotate

# One rounding more or less of the type, where ours rounds once and the reference at every operation.
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SPEC = NormSpec(eps=1e-5, offset=1.0)
types = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def close(ours: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    tolerance = roundings * CLOSE[ours.dtype]
    torch.testing.assert_close(ours.cpu(), expected.to(ours.dtype), rtol=tolerance, atol=tolerance)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference.rms_norm(x.float(), weight + SPEC.offset, SPEC.eps).to(x.dtype)


@types
def test_norms(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 180, dtype=dtype), torch.randn(154)
    rows = there(x)[:, 1, 10:164]
    close(rms_norm(rows, there(weight), SPEC), normed(x[:, 1, 10:164], weight))
    heads = there(x)[:, :, :154]
    head_norm(heads, there(weight), SPEC, heads)
    close(heads, normed(x[:, :, :154], weight))


@types
@pytest.mark.parametrize("has_after", [False, True])
def test_a_sum_and_the_norms_around_it(dtype: torch.dtype, has_after: bool) -> None:
    x, y, weight, after = torch.randn(4, 200, dtype=dtype), torch.randn(4, 200, dtype=dtype), *torch.randn(2, 200)
    total = x + 0.5 * (normed(y, after) if has_after else y)
    residual = there(x)
    around = {"after_weight": there(after), "after_spec": SPEC} if has_after else {}
    out = add_and_norm(residual, there(y), there(weight), SPEC, scale=0.5, **around)
    close(residual, total)
    close(out, normed(residual.cpu(), weight))
    assert torch.equal(add_and_norm(there(x), there(y), None, None, scale=0.5, **around), residual)


@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotated", "dtype"),
    [
        (64, 64, torch.float32),
        (80, 32, torch.bfloat16),
        *(pytest.param(96, r, d, marks=pytest.mark.slow) for r in (96, 32) for d in (torch.float32, torch.float16)),
    ],
)
def test_rotation(dtype: torch.dtype, pairing: Pairing, dim: int, rotated: int, is_normed: bool) -> None:
    qkv, positions = torch.randn(3, 8, dim, dtype=dtype), torch.tensor([7, 0, 99])
    inv_freq = 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
    angles = positions[:, None].float() * inv_freq
    cos, sin = 1.2 * angles.cos()[:, None], 1.2 * angles.sin()[:, None]
    weights = torch.randn(2, dim)
    table = rope_table(there(inv_freq), there(torch.full((rotated // 2,), 1.2)), there(torch.arange(100)))
    moved = there(qkv)
    norms = {"q_weight": there(weights[0]), "k_weight": there(weights[1]), "spec": SPEC} if is_normed else {}
    rotate(moved[:, :4], moved[:, 4:6], table, there(positions), pairing=pairing, **norms)
    expected = qkv.float().clone()
    if is_normed:
        expected[:, :4], expected[:, 4:6] = normed(qkv[:, :4], weights[0]), normed(qkv[:, 4:6], weights[1])
    half = rotated // 2
    neighbours = (slice(0, rotated, 2), slice(1, rotated, 2))
    first, second = neighbours if pairing is Pairing.NEIGHBOURS else (slice(0, half), slice(half, rotated))
    a, b = expected[:, :6, first].clone(), expected[:, :6, second].clone()
    expected[:, :6, first], expected[:, :6, second] = a * cos - b * sin, b * cos + a * sin
    close(moved, expected)
    assert torch.equal(moved[:, 6:].cpu(), qkv[:, 6:])
    step_table, again = table[there(positions)], there(qkv)
    rotate(again[:, :4], again[:, 4:6], step_table, pairing=pairing, **norms)
    assert torch.equal(again, moved)


@types
def test_activations(dtype: torch.dtype) -> None:
    x = 8 * torch.randn(3, 2 * 1100, dtype=dtype)
    gate, up = x.float().chunk(2, -1)
    # Behind 0, GELU's factor is a small difference of large numbers, on both sides.
    allowed = CLOSE[dtype] * (1 + (gate * up).abs())
    for activation in Activation:
        expected = reference.gate_and_mul(x.float(), activation)
        assert ((gate_and_mul(there(x), activation).cpu().float() - expected).abs() <= allowed).all()
    clamped = gate_and_mul(there(x), Activation.SILU, limit=3.0)
    assert ((clamped.cpu().float() - reference.clamped_gate_and_mul(x.float(), 3.0)).abs() <= allowed).all()


@types
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "hidden", "inner", "limit", "block_m"),
    [
        (16, 2, 2, 64, 40, None, 16),  # no block has room left
        (37, 3, 5, 70, 33, 7.0, 16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 4, 16, 64, 72, None, 32), (5, 2, 4, 40, 24, None, 16), (70, 4, 4, 32, 64, 1.0, 64))
        ),
    ],
)
def test_experts(
    dtype: torch.dtype,
    tokens: int,
    chosen: int,
    experts: int,
    hidden: int,
    inner: int,
    limit: float | None,
    block_m: int,
) -> None:
    x, common = torch.randn(tokens, hidden, dtype=dtype), torch.randn(tokens, hidden, dtype=dtype)
    has_bias = limit is not None
    gate_up = torch.randn(experts, 2 * inner, hidden).div(hidden**0.5).to(dtype)
    down = torch.randn(experts, hidden, inner).div(inner**0.5).to(dtype)
    biases = [torch.randn(experts, size).to(dtype) for size in (2 * inner, hidden)] if has_bias else [None, None]
    choice = torch.rand(tokens, experts).argsort(1)[:, :chosen].contiguous()
    shares = torch.rand(tokens * chosen)
    weights = ExpertWeights(*(None if part is None else there(part) for part in (gate_up, down, *biases)))
    out = run_experts(there(x), weights, there(choice), there(shares), there(common), block_m, limit)
    expected = torch.zeros(tokens, hidden)
    for token, expert in sorted((t, int(e)) for t in range(tokens) for e in choice[t]):
        pair = token * chosen + choice[token].tolist().index(expert)
        inner_x = reference.linear(x[token : token + 1].float(), gate_up[expert].float(), as_float(biases[0], expert))
        if limit is None:
            inner_x = reference.gate_and_mul(inner_x, Activation.SILU)
        else:
            inner_x = reference.clamped_gate_and_mul(inner_x, limit)
        product = reference.linear(inner_x.to(dtype).float(), down[expert].float(), as_float(biases[1], expert))
        expected[token] += product[0] * shares[pair]
    close(out, expected + common.float(), roundings=chosen)
    # A row does not depend on those beside it. (NumPy's products, which the interpreter takes, depend on the position.)
    last = slice(tokens - 1, tokens)
    alone = run_experts(
        there(x[last]), weights, there(choice[last]), there(shares[-chosen:]), there(common[last]), block_m, limit
    )
    if INTERPRETED:
        close(alone, out[last].cpu())
    else:
        assert torch.equal(alone, out[last])


def as_float(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert].float()


def run_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    choice: torch.Tensor,
    shares: torch.Tensor,
    common: torch.Tensor,
    block_m: int,
    limit: float | None,
) -> torch.Tensor:
    (tokens, hidden), (experts, _, inner), pairs = x.shape, weights.down.shape, choice.numel()
    blocks = make_blocks(pairs, experts, block_m, DEVICE)
    sort_pairs(choice, blocks)
    # What is not written shows as NaN.
    up = torch.full((pairs, inner), float("nan"), dtype=x.dtype, device=DEVICE)
    down = torch.full((pairs, hidden), float("nan"), device=DEVICE)
    out = torch.full((tokens, hidden), float("nan"), dtype=x.dtype, device=DEVICE)
    experts_up(x, weights, blocks, choice.shape[1], up, Activation.SILU, limit=limit)
    experts_down(up, weights, blocks, shares, down)
    combine(down, choice, out, common)
    return out


def test_fp8() -> None:
    x = 3 * torch.randn(5, 300)
    x[2, :128], x[3, 130], x[4, :20] = 0.0, 1e6, 2.0 ** -torch.arange(20)
    blocks, tokens, whole, given = (torch.empty(5, 300, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(4))
    by_block, by_token, scale = (torch.empty(shape, device=DEVICE) for shape in ((3, 5), (5, 1), (1,)))
    quantise_blocks(there(x), blocks, by_block.T)
    quantise_tokens(there(x), tokens, by_token)
    find_scale(there(x), scale)
    quantise_tensor(there(x), scale, whole)
    padded = torch.nn.functional.pad(x, (0, 84)).view(5, 3, 128)
    check_fp8(blocks, by_block.T.cpu(), padded)
    check_fp8(tokens, by_token.cpu(), x[:, None])
    check_fp8(whole, scale.cpu().expand(5, 1), x[:, None], padded.abs().max().expand(5, 1))
    values = torch.cat((torch.arange(-600, 600) / 2, 2.0 ** torch.linspace(-12, 1, 299), torch.tensor([torch.nan])))
    quantise_tensor(there(values.view(5, 300)), there(torch.ones(1)), given)
    assert torch.equal(bits_of(given), bits_of(values.view(5, 300).clamp(-448, 448).to(torch.float8_e4m3fn)))
    odd = there(torch.tensor([[1.0, float("nan"), float("inf")]]))
    find_scale(odd, scale)
    assert scale.isnan()
    quantise_tokens(odd, given[:1, :3], by_token[:1])
    assert by_token[0].isnan()
    wide, wide_out = torch.randn(2, 9001), torch.empty(2, 9001, dtype=torch.float8_e4m3fn, device=DEVICE)
    quantise_tokens(there(wide), wide_out, by_token[:2])
    check_fp8(wide_out, by_token[:2].cpu(), wide[:, None])


def check_fp8(
    ours: torch.Tensor, scales: torch.Tensor, parts: torch.Tensor, largest: torch.Tensor | None = None
) -> None:
    """Compare with a quantisation by torch. ``parts``: [T, blocks, elements], padded by zeros."""
    largest = parts.abs().amax(-1) if largest is None else largest
    assert torch.equal(scales, torch.where(largest == 0, 1.0, largest / torch.full_like(largest, 448.0)))
    expected = (parts / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
    assert torch.equal(bits_of(ours), bits_of(expected)[:, : ours.shape[1]])


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)
