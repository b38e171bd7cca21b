"""The mask of tokens that a row's grammar does not allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....messages.base import unpack_i32
from ....messages.worker import RowInit
from ...grammar.matchers import MakesMatchers, TokenMatcher
from ..row_params import F32, I64, RowParams
from .base import HostEdit, LogitEdit, Undo


class GrammarMask(LogitEdit["MaskedRows"]):
    """Matchers of all rows. They are on the host, so this edit is for rows that are sampled there."""

    def __init__(self, max_reqs: int, matchers: MakesMatchers) -> None:
        self._makes = matchers
        self._rows: list[TokenMatcher | None] = [None] * max_reqs

    def start(self, init: RowInit) -> bool:
        """See the base class."""
        grammar = init.sampling.grammar
        output = unpack_i32(init.output)
        self._rows[init.row] = None if grammar is None else self._makes.make(grammar, output)
        return grammar is not None

    def of(self, rows: I64, params: RowParams, positions: I64) -> MaskedRows | None:
        """See the base class."""
        found = self._found(rows, params)
        return MaskedRows(found) if found else None

    def accept(self, rows: I64, params: RowParams, tokens: I64) -> None:
        """Take the tokens that were chosen for the rows."""
        for i, matcher in self._found(rows, params):
            matcher.accept(int(tokens[i]))

    def _found(self, rows: I64, params: RowParams) -> list[tuple[int, TokenMatcher]]:
        found = ((i, self._rows[int(rows[i])]) for i in np.flatnonzero(params["penalised"]).tolist())
        return [(i, matcher) for i, matcher in found if matcher is not None]


class MaskedRows(HostEdit):
    """The rows of a step that have a grammar, each with its place among them."""

    def __init__(self, matchers: Sequence[tuple[int, TokenMatcher]]) -> None:
        self._matchers = matchers

    def change(self, logits_NV: F32, params: RowParams) -> Undo:
        """See the base class."""
        vocab = logits_NV.shape[1]
        old = []
        for i, matcher in self._matchers:
            row = logits_NV[i]
            old.append((i, row.copy()))
            allowed = np.unpackbits(matcher.mask(), count=vocab, bitorder="little").view(np.bool_)
            np.copyto(row, -np.inf, where=~allowed)
            if row.max() == -np.inf:
                # Where only the end is allowed, the ban on it (min_tokens) is lifted.
                row[allowed] = 0.0

        def undo() -> None:
            for i, values in old:
                logits_NV[i] = values

        return undo
