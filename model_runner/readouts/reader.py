"""Makes readouts of a step's hidden states and logits, on the host or on a device.

A prompt may be computed in several steps. Its mean is then a sum over them, in float64, kept by the request's row.

Shapes: H wanted hidden states, N hidden size, L wanted rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...messages.base import unpack_i32
from ...messages.readout import ReadoutSpec
from ..batch.hidden import hidden_count
from ..batch.step_plan import I64, StepPlan
from ..sampling.sampled import HostArray

Array = Any
"""A NumPy array or a tensor."""
ScoresLabels = Callable[[Array, int, I64], Array]
"""Returns the log-probabilities of labels (token ids) under one row of logits [L, V], by the row's number."""


class _Sum(NamedTuple):
    """Sum of the hidden states of a prompt's first ``tokens`` tokens."""

    states: Array
    tokens: int


class ReadoutMaker:
    """Makes the vectors of one worker's steps. ``float64``: that type, as the arrays' library names it."""

    def __init__(self, float64: Any, score_labels: ScoresLabels) -> None:
        self._float64 = float64
        self._score_labels = score_labels
        self._sums: dict[int, _Sum] = {}
        """Sums of incomplete prompts, by row. The sum of an aborted request stays until its row's next one."""

    def make(self, specs: Sequence[ReadoutSpec], plan: StepPlan, states_HN: Array, logits_LV: Array) -> list[Array]:
        """Return a vector for each of ``specs`` with ``is_last`` set, in order, and keep the sums of the others.

        ``states_HN``: states at ``plan.hidden_tokens``. Raises ``ValueError`` for a mean that skips tokens, which means
        that the scheduler has a fault.
        """
        vectors, at = [], 0
        for spec in specs:
            if spec.kind == "labels":
                labels = unpack_i32(spec.labels).astype(np.int64)
                vectors.append(self._score_labels(logits_LV, int(np.searchsorted(plan.sampled, spec.entry)), labels))
                continue
            count = hidden_count(spec, int(plan.q_lens[spec.entry]))
            states, at = states_HN[at : at + count], at + count
            if spec.kind == "last":
                # A sum of one, for its type: NumPy has no bfloat16.
                vectors.append(states.sum(0, dtype=self._float64))
                continue
            row = int(plan.rows[spec.entry])
            total = self._add(row, int(plan.starts[spec.entry]), states)
            if spec.is_last:
                vectors.append(total.states / total.tokens)
                del self._sums[row]
        return vectors

    def _add(self, row: int, start: int, states: Array) -> _Sum:
        total = _Sum(states.sum(0, dtype=self._float64), len(states))
        if start:
            before = self._sums.get(row, _Sum(None, 0))
            if before.tokens != start:
                raise ValueError(f"the mean of row {row} goes on at token {start}, its sum has {before.tokens} tokens")
            total = _Sum(before.states + total.states, start + total.tokens)
        self._sums[row] = total
        return total


def bad_entries(specs: Sequence[ReadoutSpec], vectors: Sequence[HostArray]) -> set[int]:
    """Return the entries with a vector that is not finite. ``vectors``: those of complete specs, on the host."""
    complete = [spec.entry for spec in specs if spec.is_last]
    return {entry for entry, vector in zip(complete, vectors, strict=True) if not np.isfinite(vector).all()}


def packed(vector: HostArray) -> bytes:
    """Return a vector on the host as float32 bytes."""
    return vector.astype("<f4").tobytes()
