"""Arithmetic of the sampler on a device, with sums that do not depend on the order of adding.

The weight of a token is a fixed-point number: ``exp((logit - largest) / temperature)`` in units of 2^-43, an int64.
Integer sums are exact, so neither the division of a row among programs nor a batch changes a bit of them. What is found
by them (a border of top-p, the token at a uniform number) is the same however it is searched for. The CPU adds the same
float32 weights in float64. A weight is rounded by at most 2^-44 here. Float64 sums over a vocabulary, and
implementations of float32's ``exp``, differ by more.

The *order* of a token is one int64, too: larger logit first, then lower id, as in ``top_tokens.py``. All are distinct.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...ops.triton.splitmix import GOLDEN, mix

ONE = tl.constexpr(1 << 43)
"""The mass of the best token."""
ID_BITS = tl.constexpr(20)
_LARGEST_ID = tl.constexpr((1 << 20) - 1)
ORDER_BITS = tl.constexpr(52)
MAX_VOCAB = 1 << 19
"""The largest vocabulary: the weights of its tokens add up to less than 2^63."""

_MINUS_INFINITY_KEY = tl.constexpr(0x007FFFFF)
_INFINITY_KEY = tl.constexpr(0xFF800000)
_NAN_KEY = tl.constexpr(0xFFFFFFFF)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the uniform number, float64 in [0, 1), of a seed and a position (both int64 bits), as on the host."""
    seed = seed.to(tl.uint64, bitcast=True)
    counter = mix(seed + GOLDEN) + (position.to(tl.uint64, bitcast=True) + 1) * GOLDEN
    return (mix(counter) >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def order_of(logits: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return the rank key of each token: an int64 of ``ORDER_BITS`` bits, larger for better tokens.

    A larger logit is better, and then a lower id. NaN counts as better than any number.
    """
    # Adding 0.0 turns -0.0, which equals 0.0 but has other bits, into 0.0.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    key = tl.where(logits == logits, key, _NAN_KEY)
    return (key << ID_BITS) | (ids.to(tl.int64) ^ _LARGEST_ID)


@triton.jit
def id_of(order: tl.tensor) -> tl.tensor:
    """Return the token id (int64) that a rank key of ``order_of`` was made of."""
    return (order & _LARGEST_ID) ^ _LARGEST_ID


@triton.jit
def logit_of(order: tl.tensor) -> tl.tensor:
    """Return the logit (float32) that a rank key of ``order_of`` was made of."""
    bits = ((order >> ID_BITS) - 0x80000000).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(best: tl.tensor) -> tl.tensor:
    """Return whether a row is finite, by the rank key of its best token: neither NaN nor +inf, and not only -inf."""
    key = best >> ID_BITS
    return (key > _MINUS_INFINITY_KEY) & (key < _INFINITY_KEY)


@triton.jit
def is_above_numbers(best: tl.tensor) -> tl.tensor:
    """Return whether the logit in the rank key ``best`` is NaN or +inf, so that the row is not finite."""
    return (best >> ID_BITS) >= _INFINITY_KEY


@triton.jit
def distance(logits: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return (logit - largest) / temperature, at most 0, in float32 and rounded as on the CPU."""
    return tl.div_rn(logits - largest, tl.zeros_like(logits) + temperature)


@triton.jit
def weight_at(x: tl.tensor) -> tl.tensor:
    """Return exp(``x``) for ``x`` <= 0, in float32 to one unit in the last place.

    It is the same on every device. exp(0) is exactly 1, and below -40 the result is exp(-40).
    """
    x = tl.maximum(x, -40.0)
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts, of which the first has few bits: its product is exact.
    rest = tl.fma(whole, tl.full(x.shape, -0.693359375, tl.float32), x)
    rest = tl.fma(whole, tl.full(x.shape, 2.12194440e-4, tl.float32), rest)
    series = tl.full(x.shape, 1.0 / 5040.0, tl.float32)
    series = tl.fma(series, rest, tl.full(x.shape, 1.0 / 720.0, tl.float32))
    series = tl.fma(series, rest, tl.full(x.shape, 1.0 / 120.0, tl.float32))
    series = tl.fma(series, rest, tl.full(x.shape, 1.0 / 24.0, tl.float32))
    series = tl.fma(series, rest, tl.full(x.shape, 1.0 / 6.0, tl.float32))
    series = tl.fma(series, rest, tl.full(x.shape, 0.5, tl.float32))
    series = tl.fma(series, rest, tl.full(x.shape, 1.0, tl.float32))
    series = tl.fma(series, rest, tl.full(x.shape, 1.0, tl.float32))
    return series * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(weight: tl.tensor) -> tl.tensor:
    """Return a weight in [0, 1] as a fixed-point number, in units of 1 / ``ONE``."""
    return (weight * ONE + 0.5).to(tl.int64)


@triton.jit
def share_of(total: tl.tensor, share: tl.tensor) -> tl.tensor:
    """Return the least mass, from 1 to ``total``, that is not below ``share`` (float64) of ``total``."""
    wanted = tl.ceil(total.to(tl.float64) * tl.minimum(share, 1.0))
    return tl.minimum(tl.maximum(wanted.to(tl.int64), 1), total)


@triton.jit
def target_in(total: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the share ``at`` (the uniform number) of the mass ``total``, from 0 to ``total`` - 1.

    The token at which the cumulated mass first exceeds it is drawn. ``at`` is at most 1 - 2^-53, so the product is at
    least one place below the total's float64. The total may have been rounded up by less than that.
    """
    return (total.to(tl.float64) * at).to(tl.int64)
