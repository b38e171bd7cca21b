"""Two attention implementations that are registered with transformers.

``PAGED``: attention by this server, without a mask. Transformers builds no mask for a name that its registry of masks
lacks. ``TRIAL``: attention with transformers' mask, which carries its mask function (``masks.py``).

A registered function is one for all models of a process, so it keeps no state. Each module of a model has an attribute
with the object that computes its attention.
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
        """Return the attention [1, T, H, D] of ``q`` [1, H, T, D], ``k`` and ``v`` [1, K, T, D] in ``module``.

        ``arguments``: further arguments of transformers' interface.
        """


def register() -> None:
    """Register the attention implementations ``PAGED`` and ``TRIAL`` with transformers; again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(TRIAL, _attend)
    AttentionMaskInterface.register(TRIAL, trial_mask)


def set_attention(modules: Iterable[nn.Module], attend: AttendPaged | None) -> None:
    """Let ``attend`` compute the attention of ``modules`` under the names ``PAGED`` and ``TRIAL``.

    None: their attention must not be called.
    """
    for module in modules:
        setattr(module, _ATTRIBUTE, attend)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    attend: AttendPaged = getattr(module, _ATTRIBUTE)
    return attend(module, query, key, value, attention_mask, arguments), None
