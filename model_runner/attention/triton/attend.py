"""The step that both attention kernels repeat: queries meet one block of a row's tokens.

Softmax goes along the blocks (FlashAttention-2; Dao, 2023): ``peak`` is the largest score so far, ``total`` the sum of
``2 ** (score - peak)``, ``acc`` the sum of values weighted so. Scores are in powers of two, which processors have an
instruction for. All three are float32; products are of the queries' type, and exact where that is float32.

A block of N tokens is read by the row's pages. What is masked counts as nothing, to the bit: neither a score nor a
weight of it enters. So the result depends on where blocks begin, but not on which of them are skipped.

Letters: M rows (queries times the heads that share a KV head), N tokens of a block, V elements of a value. A row of
latent KV is its value and R more; elsewhere R is 0 and keys and values are two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kv.triton.elements import load_scales
from ...ops.triton.widen import widen

LOG2E = tl.constexpr(1.4426950408889634)


def precision(dtype: torch.dtype) -> str:
    """Return the kernels' precision of products for queries of ``dtype``: float32 is multiplied exactly.

    In Triton's interpreter, bfloat16 is "widened" to float32.
    """
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return "widened"
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def product(a: tl.tensor, b: tl.tensor, acc: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Return ``acc`` + ``a`` ``b`` (a matrix product) in float32. PRECISION: what ``precision`` returns.

    "widened" is for Triton's interpreter, which takes bfloat16 for integers here.
    """
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_columns(
    base: tl.tensor, offsets: tl.tensor, mask: tl.tensor, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Load elements [FIRST, FIRST + WIDTH) of the rows at ``base`` + ``offsets``, as [rows, BLOCK].

    Elements beyond WIDTH, and those of masked rows, are 0.
    """
    columns = tl.arange(0, BLOCK)
    where = base + offsets[:, None] + (FIRST + columns)[None, :]
    if WIDTH == BLOCK:
        return tl.load(where, mask=mask[:, None], other=0)
    return tl.load(where, mask=mask[:, None] & (columns < WIDTH)[None, :], other=0)


@triton.jit
def token_offsets(
    pages: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
) -> tl.tensor:
    """Return where a row's tokens at the positions ``at`` lie in a layer's pool, as int64 offsets in elements.

    ``pages``: pointer to the row's page numbers in that pool, in order. ``mask``: positions to look up; the page of
    others is taken to be 0.
    """
    page = tl.load(pages + at // PAGE_SIZE, mask=mask, other=0)
    return page.to(tl.int64) * PAGE_STRIDE + at % PAGE_SIZE * TOKEN_STRIDE


@triton.jit
def attend_block(
    q: tl.tensor,
    q_rest: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    offsets: tl.tensor,
    is_there: tl.tensor,
    is_seen: tl.tensor,
    scale: float,
    KIND: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of N tokens to the softmax state ``peak`` [M], ``total`` [M] and ``acc`` [M, V], and return it.

    ``peak``: largest score, times log2(e). ``q_rest``: queries' elements beyond a value's. ``offsets``, ``is_there``
    [N]: tokens' places in the pool, and which may be read. ``is_seen``: tokens that each query row sees; None: all.
    """
    dtype: tl.constexpr = q.dtype
    k = widen(load_columns(k_pool, offsets, is_there, 0, VALUE_DIM, BLOCK_V), KIND, dtype)
    scores = product(q, tl.trans(k), tl.zeros([q.shape[0], offsets.shape[0]], tl.float32), PRECISION)
    if REST_DIM:
        rest = widen(load_columns(k_pool, offsets, is_there, VALUE_DIM, REST_DIM, BLOCK_R), KIND, dtype)
        scores = product(q_rest, tl.trans(rest), scores, PRECISION)
        v = k
    else:
        v = widen(load_columns(v_pool, offsets, is_there, 0, VALUE_DIM, BLOCK_V), KIND, dtype)
    if KIND != "":
        scores *= load_scales(k_scales, offsets, is_there, KIND, VALUE_DIM)[None, :]
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 * scale / SOFTCAP)) - 1.0) * LOG2E
    else:
        scores *= scale * LOG2E
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has no peak to be measured from.
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(peak - origin)
    total = total * decay + tl.sum(weights, 1)
    if KIND != "":
        value_scales = load_scales(v_scales, offsets, is_there, KIND, VALUE_DIM)
        if dtype == tl.float16:
            # A weight times a scale may be less than float16 can tell from nothing; a value is not.
            v = (v.to(tl.float32) * value_scales[:, None]).to(dtype)
        else:
            weights *= value_scales[None, :]
    acc = product(weights.to(dtype), v, acc * decay[:, None], PRECISION)
    return new_peak, total, acc
