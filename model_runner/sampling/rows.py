"""State of each row of the request table between steps: sampling parameters, history, last token.

A row's state starts with its ``RowInit``, which discards everything of the previous request. It changes with every
token that is sampled for the row. It is never read again once the scheduler stops naming the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from ...messages.sampling import COLUMNS
from ...messages.worker import RowInit
from ..grammar.matchers import MakesMatchers, NoMatchers
from .logit_edits.base import HostEdit, LogitEdit, find_edits
from .logit_edits.bias import Bias
from .logit_edits.early_stop import EarlyStop
from .logit_edits.grammar_mask import GrammarMask
from .logit_edits.penalties import Penalties, TokenHistory
from .row_params import I64, NO_LOGPROBS, PARAM_NAMES, ROW_PARAMS, RowParams

if TYPE_CHECKING:
    from torch import Tensor

LastTokens = TypeVar("LastTokens", I64, "Tensor")

# Below this, dividing by the temperature would magnify rounding errors of the logits. Such a row is greedy, as with 0.
GREEDY_TEMPERATURE = 1e-5
_FOR_EVER = 2**31
NO_MATCHERS = NoMatchers()
NO_TOKEN = -1
"""Last token of a row for which nothing was sampled; the embedding refuses it loudly."""


class RowStates(Generic[LastTokens]):
    """State of all rows.

    ``table`` is the parameters of all rows, [R]; like ``last_tokens`` it never moves.
    """

    def __init__(self, vocab_size: int, last_tokens: LastTokens, matchers: MakesMatchers = NO_MATCHERS) -> None:
        """Make the state of rows without requests.

        ``last_tokens`` [R] int64 lies on the host or on the sampling device. ``matchers``: makes the matchers of rows
        with a grammar.
        """
        max_reqs = len(last_tokens)
        self.vocab_size = vocab_size
        self.last_tokens: LastTokens = last_tokens
        self.table: RowParams = np.zeros(max_reqs, dtype=ROW_PARAMS)
        self.bias = Bias(max_reqs, vocab_size)
        self.penalties = Penalties(max_reqs)
        self.early_stop = EarlyStop(max_reqs, vocab_size)
        self.grammars = GrammarMask(max_reqs, matchers)
        self.logit_edits: tuple[LogitEdit[HostEdit], ...] = (
            self.bias,
            self.penalties,
            self.early_stop,
            self.grammars,
        )
        """Edits in the order in which they change logits."""
        self._is_edited = np.zeros(max_reqs, dtype=np.bool_)

    def start(self, init: RowInit) -> None:
        """Replace all state of the row, on the host, by that of the new request. It has no last token yet."""
        row, sampling = init.row, init.sampling
        started = [(edit, edit.start(init)) for edit in self.logit_edits]
        self._is_edited[row] = any(changes for _, changes in started)
        values = {name: getattr(sampling, name) for name in COLUMNS} | {
            "seed": sampling.seed & 0xFFFFFFFFFFFFFFFF,
            "min_new_tokens": min(sampling.min_new_tokens, _FOR_EVER),
            "top_p": sampling.top_p if sampling.top_p < 1.0 else np.inf,
            "top_k": max(sampling.top_k, 0) if sampling.top_k < self.vocab_size else 0,
            "prompt_len": init.prompt_len,
            "logprobs": NO_LOGPROBS if init.logprobs is None else min(init.logprobs, self.vocab_size),
            "greedy": sampling.temperature < GREEDY_TEMPERATURE or sampling.top_k == 1,
            "penalised": any(changes and edit.every_token for edit, changes in started),
        }
        self.table[row] = tuple(values[name] for name in PARAM_NAMES)
        self.last_tokens[row] = NO_TOKEN

    def params(self, rows: I64) -> RowParams:
        """Return a copy of the sampling parameters of these rows, [N]."""
        return self.table[rows]

    def edits(self, rows: I64, params: RowParams, positions: I64) -> tuple[HostEdit, ...]:
        """Return the changes of logits for one step, in which the ``rows`` sample tokens at ``positions`` [N].

        They are in the order in which they apply, and empty for most steps.
        """
        return find_edits(self.logit_edits, rows, params, positions)

    def is_edited(self, row: int) -> bool:
        """Return whether a logit edit may ever change the logits of the row's request."""
        return bool(self._is_edited[row])

    def histories(self, rows: I64, params: RowParams) -> list[tuple[int, TokenHistory]]:
        """Return the token histories of the penalised rows among ``rows`` [N], each with its index there."""
        return self.penalties.histories(rows, params)


def host_rows(max_reqs: int, vocab_size: int, matchers: MakesMatchers = NO_MATCHERS) -> RowStates[I64]:
    """Make the state of ``max_reqs`` rows that are sampled on the host, none of them with a request."""
    return RowStates(vocab_size, np.full(max_reqs, NO_TOKEN, dtype=np.int64), matchers)
