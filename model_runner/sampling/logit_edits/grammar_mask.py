"""The mask of tokens that a row's grammar does not allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....messages.base import unpack_i32
from ....messages.worker import RowInit
from ...grammar.matchers import MakesMatchers, TokenMatcher
from ..row_params import F32, I64, NO_LOGPROBS, RowParams
from .base import HostEdit, LogitEdit, Undo


class GrammarMask(LogitEdit["MaskedRows"]):
    """Matchers of all rows. They are on the host, so this edit is for rows that are sampled there."""

    def __init__(self, max_reqs: int, matchers: MakesMatchers) -> None:
        self._makes = matchers
        self._rows: list[TokenMatcher | None] = [None] * max_reqs

    def start(self, init: RowInit) -> bool:
        """Make a matcher that has consumed the request's output so far. Return whether the request has a grammar.

        Waits for the grammar's compilation if that is not done yet.
        """
        grammar = init.sampling.grammar
        output = unpack_i32(init.output)
        self._rows[init.row] = None if grammar is None else self._makes.make(grammar, output)
        return grammar is not None

    def of(self, rows: I64, params: RowParams, positions: I64) -> MaskedRows | None:
        """Return the masks for those ``rows`` that have a grammar; None if no row has."""
        found = self._found(rows, params)
        return MaskedRows(found, positions) if found else None

    def accept(self, rows: I64, params: RowParams, tokens: I64) -> None:
        """Feed the chosen tokens to the matchers of the rows that have a grammar; never wait."""
        found = self._found(rows, params)
        if found:
            self._makes.advance([(matcher, int(tokens[i])) for i, matcher in found])

    def _found(self, rows: I64, params: RowParams) -> list[tuple[int, TokenMatcher]]:
        found = ((i, self._rows[int(rows[i])]) for i in np.flatnonzero(params["penalised"]).tolist())
        return [(i, matcher) for i, matcher in found if matcher is not None]


class MaskedRows(HostEdit):
    """The rows of a step that have a grammar, each with its place among them."""

    def __init__(self, matchers: Sequence[tuple[int, TokenMatcher]], positions: I64) -> None:
        self._matchers = matchers
        self._positions = positions

    def change(self, logits_NV: F32, params: RowParams) -> Undo:
        """Add -inf to the logits of tokens that the grammar forbids, after waiting for the masks.

        If ``min_new_tokens`` bans the only allowed token, that ban is lifted. The returned function restores only rows
        with log-probabilities: nothing else reads the logits again.
        """
        old = []
        for i, matcher in self._matchers:
            row, own = logits_NV[i], params[i]
            if own["logprobs"] != NO_LOGPROBS:
                old.append((i, row.copy()))
            penalties = matcher.penalties()
            row += penalties
            if self._positions[i] - own["prompt_len"] < own["min_new_tokens"] and row.max() == -np.inf:
                # Only the end is allowed, which is banned as yet: the ban is lifted.
                row[:] = penalties

        def undo() -> None:
            for i, values in old:
                logits_NV[i] = values

        return undo
