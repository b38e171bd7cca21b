"""Our two names among transformers' attention implementations, and what stands behind them.

``PAGED``: attention by this server, with no mask, which transformers does not build for a name that its registry of
masks lacks. ``TRIAL``: attention with the mask that transformers means, which says what it is (``masks.py``).

A registered function is one for all models of a process, so it keeps nothing: each module of a model holds, as an
attribute, what its attention is to be computed by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from .masks import trial_mask

PAGED = "pdserve"
TRIAL = "pdserve-trial"
_ATTRIBUTE = "_pdserve_attention"


class AttendPaged(Protocol):
    """Attention of one module, or of any."""

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        """[1, T, H, D] of ``q`` [1, H, T, D], ``k`` and ``v`` [1, K, T, D]; ``arguments``: what else was given."""


def register() -> None:
    """Make both names known to transformers; once more changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(TRIAL, _attend)
    AttentionMaskInterface.register(TRIAL, trial_mask)


def set_attention(modules: Iterable[nn.Module], attend: AttendPaged | None) -> None:
    """What the attention of ``modules`` is computed by under our names; None: nothing, it must not be called."""
    for module in modules:
        setattr(module, _ATTRIBUTE, attend)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    attend: AttendPaged = getattr(module, _ATTRIBUTE)
    return attend(module, query, key, value, attention_mask, arguments), None
