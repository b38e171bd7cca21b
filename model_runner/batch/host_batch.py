"""The arrays of one forward pass on the host; ``ForwardBatch`` has a device's.

Shapes: T tokens, B entries, L wanted rows of logits. The request table has R rows of C tokens. The pool has P
pages, page 0 included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...messages.base import I32
from ...runtime.layers_done import NOT_COUNTED, PassProgress
from .hidden import HostHidden, no_hidden

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class HostBatch:
    """One pass; see ``ForwardBatch`` for each field. Arrays are contiguous, as kernels take their addresses."""

    input_ids: I64
    """[T]"""
    positions: I64
    """[T]"""
    out_cache_loc: I64
    """[T]"""
    rows: I64
    """[B]"""
    starts: I64
    """[B]"""
    q_lens: I64
    """[B]"""
    req_to_token: I32
    """[R, C]"""
    logit_indices: I64
    """[L]"""
    done: PassProgress = NOT_COUNTED
    """Counts the layers with KV that the pass has written."""
    prompt_lens: I64 | None = None
    """[B]: tokens of each row's prompt; None: see ``ForwardBatch``."""
    begun_at: I64 | None = None
    """Tokens that lie in pages which the pass begins and does not fill, one of each; None: not worked out."""
    window_pages: I32 | None = None
    """[P]; None where no layers have a pool of their own."""
    hidden: HostHidden = field(default_factory=no_hidden)
    """Hidden states that are wanted besides logits; the engine sets them."""
