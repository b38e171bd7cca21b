"""What the worker knows of each row of the request table between steps: sampling parameters, history, last token.

A row's state starts with its ``RowInit`` (which forgets everything of the request before), changes with every token
that is sampled for it, and is never read again once the scheduler names the row no more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..messages.base import unpack_i32
from ..messages.sampling import COLUMNS
from ..messages.worker import RowInit
from .penalties import I64, LogitEdits, TokenBias, TokenHistory

NO_LOGPROBS = -1
# Below this a division would blow rounding errors of the logits up to probabilities; it is greedy, as 0 is.
GREEDY_TEMPERATURE = 1e-5
_FOR_EVER = 2**31

ROW_PARAMS = np.dtype(
    [
        # As the request has them, but: top_p is infinity for everything, and top_k 0 for the whole vocabulary.
        *((name, column.dtype) for name, column in COLUMNS.items()),
        ("prompt_len", np.int64),
        ("logprobs", np.int32),  # alternatives to list, or NO_LOGPROBS
        ("greedy", np.bool_),
        ("penalised", np.bool_),  # or biased: its logits are changed before every token
    ],
    align=True,
)
"""``RowParams`` of the CPU kernels' sampling.h, which read the table as it is."""
PARAM_NAMES: tuple[str, ...] = ROW_PARAMS.names or ()
RowParams = npt.NDArray[np.void]


class RowStates:
    """State of all ``max_reqs`` rows. ``last_tokens`` ([R] int64) lives on the device, the rest on the host.

    ``table`` is the parameters of all rows, [R]; like ``last_tokens`` it never moves.
    """

    def __init__(self, max_reqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.table: RowParams = np.zeros(max_reqs, dtype=ROW_PARAMS)
        self._histories: list[TokenHistory | None] = [None] * max_reqs
        self._biases: list[TokenBias | None] = [None] * max_reqs
        self._stop_ids: list[I64] = [np.empty(0, dtype=np.int64)] * max_reqs
        self.last_tokens: Tensor = torch.full((max_reqs,), -1, dtype=torch.int64, device=device)

    def start(self, init: RowInit) -> None:
        """A new request takes the row."""
        row, sampling = init.row, init.sampling
        self._biases[row] = TokenBias.of(sampling.logit_bias, self.vocab_size)
        values = {name: getattr(sampling, name) for name in COLUMNS} | {
            "seed": sampling.seed & 0xFFFFFFFFFFFFFFFF,
            "min_new_tokens": min(sampling.min_new_tokens, _FOR_EVER),
            "top_p": sampling.top_p if sampling.top_p < 1.0 else np.inf,
            "top_k": max(sampling.top_k, 0) if sampling.top_k < self.vocab_size else 0,
            "prompt_len": init.prompt_len,
            "logprobs": NO_LOGPROBS if init.logprobs is None else min(init.logprobs, self.vocab_size),
            "greedy": sampling.temperature < GREEDY_TEMPERATURE or sampling.top_k == 1,
            "penalised": init.history is not None or self._biases[row] is not None,
        }
        self.table[row] = tuple(values[name] for name in PARAM_NAMES)
        self._histories[row] = None if init.history is None else TokenHistory(unpack_i32(init.history), init.prompt_len)
        # A client may name stop tokens that the vocabulary does not have.
        self._stop_ids[row] = np.array([t for t in init.stop_ids if 0 <= t < self.vocab_size], dtype=np.int64)
        # Until something is sampled there is no last token; the embedding refuses -1 loudly.
        self.last_tokens[row] = -1

    def params(self, rows: I64) -> RowParams:
        """[N] parameters of the rows (a copy)."""
        return self.table[rows]

    def edits(self, rows: I64, params: RowParams, positions: I64) -> LogitEdits | None:
        """What changes the rows' logits when the tokens at ``positions`` [N] are sampled; None in the common case."""
        too_short = positions - params["prompt_len"] < params["min_new_tokens"]
        if not (too_short.any() or params["penalised"].any()):
            return None
        row_list = rows.tolist()
        return LogitEdits(
            histories=[self._histories[row] for row in row_list],
            banned=[self._stop_ids[row] if short else None for row, short in zip(row_list, too_short, strict=True)],
            biases=[self._biases[row] for row in row_list],
        )

    def is_edited(self, init: RowInit) -> bool:
        """Whether something changes the logits of the request in row ``init.row``, now or later."""
        must_go_on = init.sampling.min_new_tokens > 0 and len(self._stop_ids[init.row]) > 0
        return must_go_on or bool(self.table["penalised"][init.row])

    def changes_of(self, row: int) -> tuple[I64, TokenBias | None]:
        """Tokens that a row must not stop with too early, and its biases."""
        return self._stop_ids[row], self._biases[row]

    def histories(self, rows: I64, params: RowParams) -> list[tuple[int, TokenHistory]]:
        """Those of the rows [N] that have one, each with its place among them: who is to be told of their tokens, when
        they are known, whoever has the row by then.
        """
        penalised = np.flatnonzero(params["penalised"]).tolist()
        found = [(i, self._histories[int(rows[i])]) for i in penalised]
        return [(i, history) for i, history in found if history is not None]
