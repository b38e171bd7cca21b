"""Tokens with hidden states that a pass of the CPU kernels computes in the last layer, for logits or by themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..batch.host_batch import HostBatch

I64 = npt.NDArray[np.int64]


def wanted_tokens(batch: HostBatch) -> I64:
    """Return the batch's ``logit_indices``, followed by the tokens that only hidden states are wanted of.

    No token that has both is computed twice: a pass of ranks has no room for more rows than tokens.
    """
    if not len(batch.hidden.tokens):
        return batch.logit_indices
    return np.concatenate((batch.logit_indices, np.setdiff1d(batch.hidden.tokens, batch.logit_indices)))


def places_of(tokens: I64, wanted: I64) -> I64:
    """Return the place in ``wanted`` of each of ``tokens``, which must be among them."""
    order = np.argsort(wanted, kind="stable")
    places: I64 = order[np.searchsorted(wanted[order], tokens)]
    return places
