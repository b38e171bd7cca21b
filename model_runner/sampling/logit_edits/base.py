"""The interface of logit edits: what a request does to its row's logits before a token is chosen.

An edit has one file for its state and its rule in torch. A fused kernel of Triton applies all edits (``row_reads.py``)
by the rules in ``triton_rules.py``. The CPU kernels leave rows with edits to torch, and choose from the edited logits.

| edit | rows on the host | rows on a device, torch | Triton |
|---|---|---|---|
| `Bias` | `bias.py` | `bias.py` | `triton_rules.add_bias` |
| `Penalties` | `penalties.py` | `device_penalties.py` | `triton_rules.penalise` |
| `EarlyStop` | `early_stop.py` | `early_stop.py` | `triton_rules.ban_stops` |

Shapes: N rows, V vocabulary, M edited logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....messages.worker import RowInit
from ..row_params import I64, RowParams

Upload = Callable[[npt.NDArray[Any]], Tensor]
"""Puts an array where the logits are (``Device.upload``)."""


class RowsEdit(ABC):
    """What one logit edit does to the N rows of a step."""

    def part(self, part: slice) -> RowsEdit:
        """Return the same for some of the rows. Raises ``NotImplementedError`` for edits of whole steps."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits_NV: Tensor, params: RowParams, upload: Upload | None = None) -> None:
        """Change the logits in place. ``params``: [N]. ``upload`` None: a copy that may wait for the device."""

    def count(self, tokens_N: Tensor) -> None:  # noqa: B027
        """Take note of the tokens that were chosen. Most edits depend on none."""


class LogitEdit(ABC):
    """One logit edit, with its state of every row of the request table."""

    every_token: ClassVar[bool] = True
    """Whether rows with this edit have it before each of their tokens."""

    @abstractmethod
    def start(self, init: RowInit) -> bool:
        """Replace the row's state by the new request's. Returns whether this edit may change its logits."""

    @abstractmethod
    def of(self, rows: I64, params: RowParams, positions: I64) -> RowsEdit | None:
        """Return the edit of the logits of tokens at ``positions`` [N]; None if it changes no row."""


def find_edits(edits: Sequence[LogitEdit], rows: I64, params: RowParams, positions: I64) -> tuple[RowsEdit, ...]:
    """Return what changes the rows' logits when the tokens at ``positions`` [N] are sampled; mostly nothing."""
    too_short = positions - params["prompt_len"] < params["min_new_tokens"]
    if not (too_short.any() or params["penalised"].any()):
        return ()
    found = (edit.of(rows, params, positions) for edit in edits)
    return tuple(edit for edit in found if edit is not None)


def edited(logits_NV: Tensor, params: RowParams, edits: Sequence[RowsEdit], upload: Upload | None = None) -> Tensor:
    """Return the logits with the edits applied in order: a copy if there are any."""
    if not edits:
        return logits_NV
    logits_NV = logits_NV.clone()
    for edit in edits:
        edit.apply(logits_NV, params, upload)
    return logits_NV


def upload_to(device: torch.device) -> Upload:
    """Return an ``Upload`` that may wait for the device."""
    return lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
