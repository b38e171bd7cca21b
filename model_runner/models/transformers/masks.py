"""What the masks of a model let a token see: asked of the masks, as neither arguments nor configs tell it reliably.

A mask of a trial pass carries the function that it was made by, which answers for any two positions, however short the
trial is. A mask that a model has changed, or made by itself, carries none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....model_files.errors import UnsupportedModel

_ATTRIBUTE = "_pdserve_mask_function"
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Mask function of transformers: (batch, head, query position, key position) → whether it is seen; broadcast."""


def trial_mask(*args: Any, mask_function: MaskFunction, **more: Any) -> Tensor:
    """Return transformers' mask for eager attention, with ``mask_function`` attached for ``window_of``."""
    from transformers.masking_utils import eager_mask

    # Or there is none where all tokens see each other.
    more["allow_is_bidirectional_skip"] = False
    mask: Tensor = eager_mask(*args, mask_function=mask_function, **more)
    setattr(mask, _ATTRIBUTE, mask_function)
    return mask


def window_of(mask: Tensor | None, context_length: int) -> int | None:
    """Return the sliding window of ``mask``, a mask of a trial pass: how many tokens up to its own each token sees.

    None means all of ``context_length``. Raises ``UnsupportedModel`` for a mask that is no causal sliding window.
    """
    mask_function: MaskFunction | None = getattr(mask, _ATTRIBUTE, None)
    if mask_function is None:
        raise UnsupportedModel("its attention has no mask, or one of its own making")
    last = context_length - 1
    seen = int(_visible(mask_function, last, context_length).sum())
    window = seen if seen < context_length else None
    for position in {0, 1, 2, seen - 2, seen - 1, seen, seen + 1, last // 2, last}:
        if 0 <= position <= last:
            expected = torch.zeros(context_length, dtype=torch.bool)
            expected[max(0, position + 1 - seen) : position + 1] = True
            if not torch.equal(_visible(mask_function, position, context_length), expected):
                raise UnsupportedModel("its attention is not causal, or masked otherwise than by a sliding window")
    return window


def _visible(mask_function: MaskFunction, position: int, length: int) -> Tensor:
    """Return whether the token at ``position`` sees each of the first ``length`` positions: [length] bool.

    Raises ``UnsupportedModel`` if that depends on more than positions.
    """
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    try:
        seen = mask_function(zero, zero, zero + position, torch.arange(length).view(1, 1, 1, -1))
        return seen.broadcast_to(1, 1, 1, length).reshape(-1)
    except (IndexError, RuntimeError) as e:
        # It looks up something of the trial's own tokens, so it depends on more than positions.
        raise UnsupportedModel("its attention's mask depends on more than positions") from e
