"""Cases of attention: a pass over rows with KV in scattered pages.

Shapes: T tokens, H query heads, K KV heads, D head_dim, C tokens of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_files.spec import AttentionSpec
from ...model_runner.attention.base import AttentionLimits
from ...model_runner.attention.triton.backend import TritonAttention
from ...model_runner.attention.triton.pool_views import layer_views
from ...model_runner.attention.triton.store_kv import store_kv
from ...model_runner.attention.triton.tiles import DecodeTiles, PrefillTiles, TileShape, decode_tiles, prefill_tiles
from ...model_runner.batch.forward_batch import ForwardBatch
from ...model_runner.device.choice import KV_DTYPES
from ...model_runner.kv.layout import KVShape, make_layout
from ...model_runner.kv.pool import make_pool
from ..errors import BenchOptionsError
from .case import Ask, Case, Mode, Place, replaced

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-3}
TOLERANCE_OF_BYTES = 1e-1
"""Maximum difference where KV is rounded to a byte."""


def attention(ask: Ask, place: Place) -> Case:
    """Prepare attention of a decode step or of one prompt on random data, and a reference result.

    It is a decode step if the shape in ``ask`` has ``rows``; else the shape has the prompt's ``tokens``. ``place``:
    where the kernel runs.
    """
    sizes, is_decode = ask.sizes, "rows" in ask.sizes
    rows = sizes["rows"] if is_decode else 1
    count = 1 if is_decode else sizes["tokens"]
    context = sizes["context"] if is_decode else sizes["cached"] + count
    heads, kv_heads, dim, page_size = (sizes[name] for name in ("heads", "kv_heads", "head_dim", "page_size"))
    kept = ask.dtype if ask.variant == "plain" else getattr(torch, KV_DTYPES.get(ask.variant, ask.variant))
    tiles, tile = _tiles(ask, place, TileShape(dim, dim, heads // kv_heads, kept.itemsize, ask.dtype.itemsize))
    window = sizes["window"] or None
    spec = AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, window=window)
    layout = make_layout(KVShape(1, kv_heads, dim), page_size, kept)
    per_row = -(-context // page_size)
    pool = make_pool(layout, rows * per_row + 1, place.device)
    limits = AttentionLimits(heads, () if window is None else (window,), rows, per_row * page_size)
    order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(0)).view(rows, -1, 1) + 1
    table = (order * page_size + torch.arange(page_size)).view(rows, -1).to(place.device)
    k, v = (place.randn(rows, context, kv_heads, dim, dtype=ask.dtype) for _ in range(2))
    q = place.randn(rows * count, heads, dim, dtype=ask.dtype)
    for row in range(rows):
        store_kv(k[row], v[row], table[row, :context].long(), layer_views(pool)[0])
    own = TritonAttention([pool], ask.dtype, limits, tiles)
    own.plan(_batch(table, context - count, count))
    new_k, new_v = (kv[:, context - count :].flatten(0, 1) for kv in (k, v))
    seen = context if window is None else min(context, window)
    read = (seen if is_decode else min(context, seen + count)) * rows * layout.page_bytes // page_size
    pairs = rows * seen if is_decode else sum(min(seen, context - count + i + 1) for i in range(count))
    return Case(
        lambda: own.forward(0, q, new_k, new_v, spec).view(-1, heads, dim),
        lambda: _reference(q.view(rows, count, heads, dim), k, v, window),
        TOLERANCE[ask.dtype] if ask.variant == "plain" else TOLERANCE_OF_BYTES,
        tile,
        read + 2 * q.nbytes,
        4 * heads * dim * pairs,
    )


def _tiles(ask: Ask, place: Place, shape: TileShape) -> tuple[tuple[DecodeTiles, PrefillTiles], dict[str, int]]:
    """Return the tiles of the decode and the prefill kernel, and the sizes of the one that is measured.

    ``ask.tile`` replaces sizes of that one. ``shape``: what the default tiles depend on.
    """
    capability = 90 if place.mode is Mode.INTERPRETED else place.capability
    try:
        both = decode_tiles(shape, capability), prefill_tiles(shape, capability)
    except ValueError as e:
        raise BenchOptionsError(str(e)) from None
    if "rows" in ask.sizes:
        tile = replaced(both[0]._asdict(), ask.tile)
        return (DecodeTiles(**tile), both[1]), tile
    tile = replaced(both[1]._asdict(), ask.tile)
    return (both[0], PrefillTiles(**tile)), tile


def _batch(table: Tensor, start: int, count: int) -> ForwardBatch:
    """Return a forward batch of ``count`` tokens of every row of ``table``, from position ``start`` on."""
    rows, device = len(table), table.device
    positions = torch.arange(start, start + count, device=device).repeat(rows)
    row_of_token = torch.arange(rows, device=device).repeat_interleave(count)
    return ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        out_cache_loc=table[row_of_token, positions].long(),
        rows=torch.arange(rows, device=device),
        starts=[start] * rows,
        q_lens=[count] * rows,
        req_to_token=table.int(),
        logit_indices=positions[:0],
    )


def _reference(q_RTHD: Tensor, k_RCKD: Tensor, v_RCKD: Tensor, window: int | None) -> Tensor:
    """Compute causal attention with torch in float32, and return it as [R * T, H, D]. ``window`` is in tokens."""
    count, context = q_RTHD.shape[1], k_RCKD.shape[1]
    at = torch.arange(context - count, context, device=q_RTHD.device)[:, None]
    keys = torch.arange(context, device=q_RTHD.device)[None, :]
    mask = keys <= at
    if window is not None:
        mask &= keys > at - window
    q, k, v = (x.float().transpose(1, 2) for x in (q_RTHD, k_RCKD, v_RCKD))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2).flatten(0, 1)
