"""Check of a transformers model at load: passes through a small KV pool against the model's own attention.

A model that differs is refused. First comes what must hold in every type, rounding or not:

- Explicit positions give what the default positions give.
- Without attention, a token's logits, queries, keys and values depend on the token and its position only.

Then two rows are computed in pieces that share passes, and a row near the end of the context beside one at its
beginning. Each is compared with the whole row by itself, as transformers computes it. ``attention_check.py`` has
compared each layer's attention before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....model_files.errors import UnsupportedModel
from ...attention.registry import BackendNeeds, make_attention_backend
from ...batch.forward_batch import ForwardBatch
from ...kv.layout import KVShape, make_layout
from ...kv.pool import MHATokenToKVPool
from .model import Bare, TransformersModel

PAGE = 4
ROW = 32
"""Positions of a row, of which there are ``ROWS``: whole pages, each row's behind the one before."""
ROWS = 4
STEPS = (((0, 9),), ((0, 7), (1, 6)), ((0, 1), (1, 1)), ((1, 4), (0, 1)), ((0, 3), (1, 1)))
"""Passes, of entries (row, tokens)."""
NEAR, FAR = 2, 3
FAR_TOKENS = 5
EXACT, REGROUPED = 1e-3, 0.02
"""Tolerances for the same operations on the same values.

With other tokens beside them, an expert's share is computed in another size. It then rounds otherwise in types of 16
bits.
"""
TOLERANCE, ROUNDED = 1e-3, 0.3
"""Limits of a token's logits: root mean square of the difference, as a share of their standard deviation.

In float32 it holds for all tokens. In shorter types it grows with the depth, and rounding can choose another expert;
there it holds for half of the tokens.
"""


def check_against_eager(
    model: TransformersModel, shape: KVShape, vocab_size: int, context_length: int, like: Tensor
) -> None:
    """Raise ``UnsupportedModel`` unless ``model`` computes the same on a KV pool as with its own attention.

    Call ``use_pool`` before the next pass. ``like``: a tensor of the device and the type of activations.
    """
    _Check(model, shape, vocab_size, context_length, like).run()


class _Check:
    def __init__(
        self, model: TransformersModel, shape: KVShape, vocab_size: int, context_length: int, like: Tensor
    ) -> None:
        self._model = model
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._dtype, self._device = like.dtype, like.device
        pages = ROWS * ROW // PAGE + 1
        pool = MHATokenToKVPool(make_layout(shape, PAGE, self._dtype), pages, self._device)
        self._attention = make_attention_backend("torch", BackendNeeds([pool], self._dtype))
        slots = torch.arange(ROWS * ROW, dtype=torch.int32, device=self._device) + PAGE
        self._table = slots.view(ROWS, ROW)
        spread = torch.arange(ROWS * ROW, device=self._device) * 7919 + 11
        self._tokens = (spread % vocab_size).view(ROWS, ROW)
        self._lens = [0] * ROWS

    def run(self) -> None:
        """Compare passes on a small KV pool with the model's own attention.

        Raises ``UnsupportedModel`` at the first difference.
        """
        with torch.inference_mode():
            self._check_positions()
            self._check_neighbours()
            self._check_far_neighbours()
            self._model.use_pool()
            pieces = [self._forward(step) for step in STEPS]
            start = max(0, self._context_length - FAR_TOKENS)
            far = torch.arange(start, self._context_length, device=self._device)
            mixed = self._forward(((NEAR, FAR_TOKENS), (FAR, len(far))), far)
            for row in (0, 1):
                got = torch.cat([piece[row] for piece in pieces if row in piece])
                self._compare(got, self._model.eager(self._tokens[row, : len(got)]), "")
            self._compare(mixed[NEAR], self._model.eager(self._tokens[NEAR, :FAR_TOKENS]), " beside a long row")
            expected = self._model.eager(self._tokens[FAR, : len(far)], far)
            self._compare(mixed[FAR], expected, " at the end of the context")

    def _check_positions(self) -> None:
        row = self._tokens[0]
        given = self._model.eager(row, torch.arange(ROW, device=self._device))
        if _error(given, self._model.eager(row)).max() > EXACT:
            raise UnsupportedModel("its positions are not those of the tokens in their row, from 0 on")

    def _check_neighbours(self) -> None:
        row, other = self._tokens[0], self._tokens[1].clone()
        kept = torch.arange(2, ROW, 5, device=self._device)
        other[kept] = row[kept]
        positions = torch.arange(ROW, device=self._device)
        alone, beside = (self._model.without_attention(tokens, positions) for tokens in (row, other))
        if _difference(alone, beside, kept) > (EXACT if self._dtype == torch.float32 else REGROUPED):
            raise UnsupportedModel("tokens act on others by more than attention")

    def _check_far_neighbours(self) -> None:
        row = self._tokens[0]
        positions = torch.arange(ROW, device=self._device)
        mixed = positions.clone()
        mixed[ROW // 2 :] += max(0, self._context_length - ROW)
        alone, beside = (self._model.without_attention(row, where) for where in (positions, mixed))
        if _difference(alone, beside, positions[: ROW // 2]) > EXACT:
            raise UnsupportedModel(
                "what a token computes depends on how far others are: its rotary frequencies change with the longest "
                "request; a shorter --context-length may do without"
            )

    def _forward(self, step: tuple[tuple[int, int], ...], far: Tensor | None = None) -> dict[int, Tensor]:
        """Compute one pass on the pool, and return each row's new logits by row.

        ``step``: entries (row, number of tokens), which continue their rows. ``far``: positions that the model is told
        for row ``FAR``, while attention uses the row's own; None: the row's own for both.
        """
        starts = [self._lens[row] for row, _ in step]
        spans = [torch.arange(s, s + n, device=self._device) for s, (_, n) in zip(starts, step, strict=True)]
        counts = [count for _, count in step]
        batch = ForwardBatch(
            input_ids=torch.cat([self._tokens[row, span] for (row, _), span in zip(step, spans, strict=True)]),
            positions=torch.cat(spans),
            out_cache_loc=torch.cat(
                [self._table[row, span] for (row, _), span in zip(step, spans, strict=True)]
            ).long(),
            rows=torch.tensor([row for row, _ in step], device=self._device),
            starts=starts,
            q_lens=counts,
            req_to_token=self._table,
            # Backwards: the order of the answer is that of the indices.
            logit_indices=torch.arange(sum(counts) - 1, -1, -1, device=self._device),
        )
        for row, count in step:
            self._lens[row] += count
        positions = torch.cat([*spans[:-1], far]) if far is not None else batch.positions
        self._attention.plan(batch)
        logits = self._model.forward_at(positions, batch, self._attention)
        if logits.shape != (sum(counts), self._vocab_size):
            raise UnsupportedModel(
                f"its logits are {list(logits.shape)} where {[sum(counts), self._vocab_size]} were asked for"
            )
        return dict(zip([row for row, _ in step], torch.split(logits.flip(0), counts), strict=True))

    def _compare(self, got: Tensor, expected: Tensor, where: str) -> None:
        """Compare a row's logits [T, V] with those of transformers' own pass; ``where`` is for the message.

        Raises ``UnsupportedModel`` if they differ.
        """
        error = _error(got, expected)
        is_right = error.max() <= TOLERANCE if self._dtype == torch.float32 else error.median() <= ROUNDED
        if not is_right:
            raise UnsupportedModel(
                f"its logits with attention on the KV pool differ from transformers' own{where}, by up to "
                f"{float(error.max()):.2g} of their standard deviation"
            )


def _error(got: Tensor, expected: Tensor) -> Tensor:
    """Return how far each token's logits [T, V] are off, as a share of their standard deviation: [T]."""
    size = expected.std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (got - expected).pow(2).mean(-1).sqrt() / size


def _difference(one: Bare, other: Bare, tokens: Tensor) -> float:
    """Return how far the results of two passes differ at ``tokens``, as a share of the standard deviation.

    ``tokens``: indices into T. The result is the largest of the medians for logits and for each layer's queries, keys
    and values.
    """
    pairs = [(one.logits, other.logits), *zip(one.attended, other.attended, strict=True)]
    return max(float(_error(a[tokens], b[tokens]).median()) for a, b in pairs)
