"""Hidden states that a pass of a torch engine gives besides its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .hidden import HostHidden

StatesAt = Callable[[Tensor], Tensor]
"""Returns the hidden states after the final norm, [H, N], of the tokens with these indices, [H] int64."""


class ReadsHidden(Protocol):
    """Reader of a pass's hidden states."""

    def read(self, states_at: StatesAt) -> None:
        """Keep what ``states_at`` returns for the wanted tokens. The model calls this once a pass."""
        ...


class _ReadsNothing:
    def read(self, states_at: StatesAt) -> None:
        """Do nothing: no hidden states are wanted."""


READS_NOTHING = _ReadsNothing()


class TensorHidden:
    """Keeps the hidden states of ``tokens`` ([H] int64) where they are computed. ``states``: [H, N], of any type."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self.states = torch.empty(0, 0, device=tokens.device)

    def read(self, states_at: StatesAt) -> None:
        """Compute the wanted states."""
        self.states = states_at(self._tokens)


class HostTensorHidden:
    """Keeps hidden states of a pass on the host in ``hidden``, as float32."""

    def __init__(self, hidden: HostHidden) -> None:
        self._hidden = hidden

    def read(self, states_at: StatesAt) -> None:
        """Compute the wanted states."""
        self._hidden.states = states_at(torch.from_numpy(self._hidden.tokens)).float().numpy()


def host_reader(hidden: HostHidden) -> ReadsHidden:
    """Return a reader that keeps states in ``hidden``, or one that does nothing if no token is wanted."""
    return HostTensorHidden(hidden) if len(hidden.tokens) else READS_NOTHING
