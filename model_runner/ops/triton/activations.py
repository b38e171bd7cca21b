"""Activations of gated networks: ``act(gate) * up`` in one pass, float32 within, rounded once.

Shapes: T tokens, I inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....model_files.spec import Activation
from ..reference import CLAMPED_GAIN

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
CLAMPED = tl.constexpr(3)
"""GPT-OSS's, see ``ExpertsSpec.limit``."""
_GAIN = tl.constexpr(CLAMPED_GAIN)
_BY_NAME = {Activation.SILU: SILU, Activation.GELU: GELU, Activation.GELU_TANH: GELU_TANH}


def kind_of(activation: Activation, limit: float | None = None) -> int:
    """Return the constant by which the kernel ``gated`` knows an activation.

    With a ``limit`` it is GPT-OSS's clamped one, whatever the activation.
    """
    kind = CLAMPED if limit is not None else _BY_NAME[activation]
    return int(kind.value)


def gate_and_mul(x: Tensor, activation: Activation, out: Tensor | None = None, *, limit: float | None = None) -> Tensor:
    """Return ``activation(gate) * up`` [T, I] for ``x`` = [gate, up] [T, 2 I], in its type.

    ``out``: memory for the result; None: allocate it. With a ``limit``, ``activation`` is ignored and GPT-OSS's clamped
    one is applied.
    """
    tokens, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, inner), dtype=x.dtype, device=x.device) if out is None else out
    block = min(triton.next_power_of_2(inner), 1024)
    if tokens:
        _gate_and_mul[(tokens, triton.cdiv(inner, block))](
            x, out, x.stride(0), out.stride(0), inner, limit or 0.0, KIND=kind_of(activation, limit), BLOCK=block
        )
    return out


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return the sigmoid of ``x``, which must be float32, in float32.

    It never overflows. Other types have to be converted first.
    """
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, limit: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return the activation of ``gate`` times ``up``, all in float32. ``KIND``: the activation, from ``kind_of``.

    ``limit`` counts for the clamped activation alone.
    """
    if KIND == SILU:
        result = gate * sigmoid(gate) * up
    elif KIND == GELU:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == GELU_TANH:
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        result = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        result = gate * sigmoid(gate * _GAIN) * (up + 1.0)
    return result


@triton.jit
def _gate_and_mul(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token: tl.tensor,
    out_token: tl.tensor,
    inner: tl.tensor,
    limit: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < inner
    gate = tl.load(x_ptr + token * x_token + at, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_token + inner + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_token + at, gated(gate, up, limit, KIND).to(out_ptr.dtype.element_ty), mask=is_in)
