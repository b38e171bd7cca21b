"""Logits of prompt tokens with log-probabilities, computed in pieces after the pass.

A context of 131,072 tokens would have 34 GB of them with a vocabulary of 128,256 tokens, in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

LogitsAt = Callable[[Tensor], Tensor]
"""Returns the logits [L, V] at the tokens of the pass with these indices, [L] int64."""
ROWS = 4096
"""Maximum rows of logits in memory, besides those of sampled tokens."""


class ScoresLater(Protocol):
    """Holder of logits that are wanted after the pass."""

    def keep(self, logits_at: LogitsAt) -> None:
        """Keep ``logits_at``, and with it the pass's last states. The model calls this once a pass."""
        ...


class _ScoresNothing:
    def keep(self, logits_at: LogitsAt) -> None:
        """Do nothing: all wanted logits are those that the pass returns."""


SCORES_NOTHING = _ScoresNothing()


def are_many(count: int) -> bool:
    """Return whether the logits of ``count`` scored tokens are too many to be computed with the pass."""
    return count > ROWS


class ScoredLogits:
    """Logits at ``tokens`` ([N] int64) of one pass."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._logits_at: LogitsAt | None = None
        self._begin = 0
        self._piece: Tensor | None = None
        """Logits at up to ``ROWS`` tokens from number ``_begin`` on; None before the first."""

    def keep(self, logits_at: LogitsAt) -> None:
        """Compute logits by ``logits_at`` when they are asked for."""
        self._logits_at = logits_at

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the logits at tokens number ``begin`` to ``end``, in order, in pieces of at most ``ROWS`` rows.

        A piece must not be kept when the next one is asked for. Pieces begin at multiples of ``ROWS``, so ascending
        calls compute each row once.
        """
        while begin < end:
            first = begin - begin % ROWS
            piece = self._piece if first == self._begin else None
            if piece is None:
                assert self._logits_at is not None, "the pass comes first"
                # The old piece goes before the new one is computed.
                self._piece = None
                piece = self._logits_at(self._tokens[first : first + ROWS])
                self._begin, self._piece = first, piece
            stop = min(end, first + ROWS)
            yield piece[begin - first : stop - first]
            begin = stop
