"""Random mixes of entries, and attention over them written out in float64."""

from __future__ import annotations

from dataclasses import replace

import torch

from pdserve.model_files.spec import AttentionSpec, MLASpec, NormSpec
from pdserve.model_runner.batch.forward_batch import ForwardBatch

HEADS, KV_HEADS, DIM, LAYERS, PAGES = 6, 2, 16, 2, 700
PLAIN = AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5)
SPECS = {
    "plain": PLAIN,
    "scaled": replace(PLAIN, scale=0.4),
    "window": replace(PLAIN, window=37),
    "window of one": replace(PLAIN, window=1),
    "capped": replace(PLAIN, scale=0.5, softcap=1.5),
    "capped window": replace(PLAIN, window=5, softcap=2.0),
    "sinks": replace(PLAIN, sinks=True),
    "capped sinks in a window": replace(PLAIN, window=20, softcap=2.0, sinks=True),
}
LATENT = MLASpec(
    heads=HEADS,
    q_lora_rank=None,
    kv_lora_rank=DIM,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=8,
    scale=0.3,
    norm=NormSpec(eps=1e-6),
)


def make_batch(starts: list[int], q_lens: list[int], page_size: int) -> ForwardBatch:
    """Make a batch of rows 1, 2, … over random pages. Positions that a row does not map yet have a slot out
    of range.
    """
    free = (torch.randperm(PAGES - 1) + 1).tolist()
    table = torch.full((len(starts) + 1, 512), 10**9, dtype=torch.int32)
    locs, positions = [], []
    for row, (start, q_len) in enumerate(zip(starts, q_lens, strict=True), 1):
        for position in range(start + q_len):
            first = position % page_size == 0
            table[row, position] = free.pop() * page_size if first else table[row, position - 1] + 1
        positions.append(torch.arange(start, start + q_len))
        locs.append(table[row, start : start + q_len].long())
    return ForwardBatch(
        input_ids=torch.zeros(sum(q_lens), dtype=torch.int64),
        positions=torch.cat(positions),
        out_cache_loc=torch.cat(locs),
        rows=torch.arange(1, len(starts) + 1),
        starts=starts,
        q_lens=q_lens,
        req_to_token=table,
        logit_indices=torch.empty(0, dtype=torch.int64),
    )


def attend_in_float64(
    batch: ForwardBatch,
    data: torch.Tensor,
    layer: int,
    q: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the attention of ``batch`` in float64. ``data``: the pool's contents with this pass's KV stored."""
    page_size, out, first = data.shape[3], [], 0
    for row, start, q_len in zip(batch.rows.tolist(), batch.starts, batch.q_lens, strict=True):
        for i in range(q_len):
            begin = 0 if spec.window is None else max(0, start + i + 1 - spec.window)
            slots = batch.req_to_token[row, begin : start + i + 1].long()
            kv = data[slots // page_size, layer, :, slots % page_size].double()
            k, v = (kv[:, part].repeat_interleave(HEADS // KV_HEADS, 1) for part in (0, 1))
            scores = torch.einsum("hd,shd->hs", q[first + i].double(), k) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * (scores / spec.softcap).tanh()
            shares = scores.exp()
            everything = shares.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None])
            weights = shares / everything
            out.append(torch.einsum("hs,shd->hd", weights, v).flatten())
        first += q_len
    return torch.stack(out)
