"""Chooses the next token of each row, as a pure function of the row's logits, parameters, seed and position.

The rules apply in this order, as in the systems that users come from:

- Biases, then repetition, frequency and presence penalties, then the ban on stop tokens change the logits.
- Temperature divides the logits.
- Top-k keeps the most likely tokens.
- Top-p keeps a share of what top-k left, renormalised.
- Min-p drops tokens by their probability relative to the most likely one.

What is left is renormalised and inverted at the row's uniform number, in vocabulary order. Top-k and top-p keep the
first of the order "more likely first, then lower id", so equals at the border are cut by id. Temperature 0 and top_k 1
mean the first token of that order.

Rows do not depend on the batch. A row takes its way through the code by its own values only, and every operation works
on rows independently (softmax and sums over the last dimension, float64 running sums, comparisons).

Shapes: N rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .draws import CANDIDATES, DrawnRows, find_kept, from_all, from_candidates, from_top_k, zero_below
from .inverse_cdf import pick
from .row_params import F32, I64, RowParams
from .sampled import F64, HostArray, Sampled
from .top_tokens import top_tokens

# A nucleus that the candidates don't hold is looked for in the sorted probabilities: the largest SORTED of them, and
# last, all.
SORTED = 8192
# On a CPU rows are drawn in groups of about this many logits. Larger temporaries leave the cache, and the allocator
# hands their memory back to the kernel each time. At once, 256 rows of a vocabulary of 49,152 took 7 times as long.
CHUNK_LOGITS = 1 << 20


class TorchRules:
    """Chooses tokens by operations of torch: the ``HostSampler`` of engines without the CPU kernels."""

    def sample(self, logits_NV: F32, params: RowParams, positions: I64) -> Sampled[HostArray]:
        """Choose tokens by the function ``sample``, on tensors that share the arrays' memory."""
        tokens, finite = sample(torch.from_numpy(logits_NV), params, positions)
        return Sampled(tokens.numpy(), finite.numpy())

    def log_sums(self, logits_NV: F32, rows: I64) -> F64:
        """Return the logarithm of the sum of exponentials of each of these ``rows`` of logits, by torch.

        It is computed as the largest logit minus the largest log-softmax, about ``CHUNK_LOGITS`` logits at a time.
        """
        size = max(1, CHUNK_LOGITS // logits_NV.shape[1])
        sums = np.empty(len(rows), dtype=np.float64)
        for begin in range(0, len(rows), size):
            part = slice(begin, begin + size)
            logits = torch.from_numpy(logits_NV[rows[part]])
            # Not logsumexp: it divides the sum of a row alone among threads, which changes its bits.
            sums[part] = (logits.amax(1).double() - torch.log_softmax(logits, 1).amax(1)).numpy()
        return sums


def sample(logits_NV: Tensor, params: RowParams, positions: I64) -> Sampled[Tensor]:
    """Choose the token at ``positions[i]`` of each row's request, by the rules of this module.

    ``logits_NV``: float32, left as they are. A row that is not ``finite`` gets a token that means nothing.
    """
    if params["greedy"].all():
        tokens_N, max_N = _best(logits_NV)
        return Sampled(tokens_N, torch.isfinite(max_N))
    count, vocab = logits_NV.shape
    size = max(1, CHUNK_LOGITS // vocab) if logits_NV.device.type == "cpu" else count
    parts = []
    for begin in range(0, count, size):
        part = slice(begin, begin + size)
        parts.append(_sample_chunk(logits_NV[part], params[part], positions[part]))
    return Sampled(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _sample_chunk(logits_NV: Tensor, params: RowParams, positions: I64) -> Sampled[Tensor]:
    tokens_N, max_N = _best(logits_NV)
    finite_N = torch.isfinite(max_N)
    drawn = np.flatnonzero(~params["greedy"] & finite_N.cpu().numpy())
    if len(drawn):
        rows = DrawnRows.of(logits_NV, max_N, params, positions).take(drawn)
        tokens_N[torch.from_numpy(drawn).to(tokens_N.device)] = _draw(rows)
    return Sampled(tokens_N, finite_N)


def _best(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's lowest id with the largest logit, and that logit (NaN if the row has one)."""
    on_cpu = logits_NV.device.type == "cpu"
    # On a CPU NumPy's argmax is vectorised, ten times faster than torch's, and promises the first of equals.
    best_N = torch.from_numpy(logits_NV.numpy().argmax(1)) if on_cpu else logits_NV.argmax(1)
    return best_N, logits_NV.gather(1, best_N.unsqueeze(1)).squeeze(1)


def _draw(rows: DrawnRows) -> Tensor:
    """Draw a token for each row, [N] int64. Each row is computed in one of four ways, chosen by its own values only."""
    top_k = rows.top_k_N1.squeeze(1).cpu().numpy()
    top_p = rows.top_p_N1.squeeze(1).cpu().numpy()
    few = (top_k > 0) & (top_k <= CANDIDATES)
    whole = (top_k == 0) & (top_p == np.inf)
    nucleus = (top_k == 0) & ~whole
    tokens_N = torch.empty(len(top_k), dtype=torch.int64, device=rows.logits_NV.device)
    for way, members in ((from_top_k, few), (_from_all, whole), (_from_nucleus, nucleus)):
        which = np.flatnonzero(members)
        if len(which):
            tokens_N[torch.from_numpy(which).to(tokens_N.device)] = way(rows.take(which))
    large = np.flatnonzero(top_k > CANDIDATES)
    if len(large):
        part = rows.take(large)
        weights_NV = torch.softmax(part.scaled(part.logits_NV), 1)
        tokens_N[torch.from_numpy(large).to(tokens_N.device)] = _from_sorted(part, weights_NV)
    return tokens_N


def _from_all(rows: DrawnRows) -> Tensor:
    return from_all(rows, drops_tail=rows.drops_tail())


def _from_nucleus(rows: DrawnRows) -> Tensor:
    """Draw with top-p and without top-k: from the best ``CANDIDATES`` if they suffice, else from sorted weights."""
    weights_NV = torch.softmax(rows.scaled(rows.logits_NV), 1)
    ids_NK = top_tokens(rows.logits_NV, CANDIDATES).ids
    weights_NK = weights_NV.gather(1, ids_NK)
    enough = (weights_NK.sum(1, dtype=torch.float64) >= rows.top_p_N1.squeeze(1)).cpu().numpy()
    tokens_N = torch.empty_like(ids_NK[:, 0])
    near, far = np.flatnonzero(enough), np.flatnonzero(~enough)
    if len(near):
        index = torch.from_numpy(near).to(tokens_N.device)
        tokens_N[index] = from_candidates(rows.take(near), weights_NK[index], ids_NK[index])
    if len(far):
        index = torch.from_numpy(far).to(tokens_N.device)
        tokens_N[index] = _from_sorted(rows.take(far), weights_NV[index])
    return tokens_N


def _from_sorted(rows: DrawnRows, weights_NV: Tensor) -> Tensor:
    """Draw a token for each row with top-p far beyond the candidates, or with a large top-k.

    ``weights_NV``: the tokens' probabilities, which are overwritten.
    """
    kept = find_kept(rows, weights_NV, SORTED)
    unsure = np.flatnonzero(~kept.certain_N.cpu().numpy())
    if len(unsure):
        index = torch.from_numpy(unsure).to(weights_NV.device)
        wider = find_kept(rows.take(unsure), weights_NV[index], weights_NV.shape[1])
        kept.count_N[index] = wider.count_N
        kept.border_N[index] = wider.border_N
    surpluses = (zero_below(weights_NV, kept.border_N.unsqueeze(1)) - kept.count_N).tolist()
    for row, surplus in enumerate(surpluses):
        if surplus > 0:
            equals = (weights_NV[row] == kept.border_N[row]).nonzero().squeeze(1)
            # Weights are rounded more coarsely than logits: equal ones may be of different logits.
            best_first = rows.logits_NV[row, equals].sort(descending=True, stable=True).indices
            weights_NV[row, equals[best_first[-surplus:]]] = 0.0
    return pick(weights_NV, rows.uniforms_N)
