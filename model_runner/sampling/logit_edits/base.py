"""The interface of logit edits: what a request does to its row's logits before a token is chosen.

An edit has one file for its state and its rule. A rule names the logits that it changes and computes their new values.
It is the same for NumPy's arrays on the host and torch's tensors on a device. A fused kernel of Triton applies all
edits (``row_reads.py``) by the rules in ``triton_rules.py``. The CPU kernels leave rows with edits to NumPy, and choose
from the edited logits.

| edit | rows on the host | rows on a device, torch | Triton |
|---|---|---|---|
| `Bias` | `bias.py` | `bias.py` | `triton_rules.add_bias` |
| `Penalties` | `penalties.py` | `device_penalties.py` | `triton_rules.penalise` |
| `EarlyStop` | `early_stop.py` | `early_stop.py` | `triton_rules.ban_stops` |

Shapes: N rows, V vocabulary, M edited logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ....messages.worker import RowInit
from ..row_params import F32, I64, RowParams

if TYPE_CHECKING:
    from torch import Tensor

Upload = Callable[[npt.NDArray[Any]], Any]
"""Puts an array where the logits are: ``Device.upload``, or ``on_host``."""


def on_host(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array itself: it takes the part of ``Device.upload`` for logits on the host."""
    return array


class Places(NamedTuple):
    """The logits that an edit changes, each once."""

    rows: I64
    """[M]"""
    ids: I64
    """[M]: tokens."""

    @classmethod
    def of(cls, ids_by_row: Sequence[tuple[int, I64]]) -> Places:
        """Join token ids of several rows into one list of places. Each pair is a row's index and its token ids."""
        rows = [np.full(len(ids), row, dtype=np.int64) for row, ids in ids_by_row]
        return cls(np.concatenate(rows), np.concatenate([ids for _, ids in ids_by_row]))


Undo = Callable[[], None]
"""Puts logits back as they were."""


class HostEdit(ABC):
    """What one logit edit does to the N rows of a step that are sampled on the host."""

    @abstractmethod
    def change(self, logits_NV: F32, params: RowParams) -> Undo:
        """Change logits in place, and return a function that restores them.

        Rows that are not read again may stay changed. ``params``: [N] sampling parameters.
        """


class RowsEdit(ABC):
    """What one logit edit does to the N rows of a step."""

    @abstractmethod
    def apply(self, logits_NV: Tensor, params: RowParams, upload: Upload) -> None:
        """Queue a change of logits on a device, in place. ``params``: [N]. ``upload`` copies arrays there."""

    def count(self, tokens_N: Tensor) -> None:  # noqa: B027
        """Note the tokens that were chosen for the step's rows, for later edits. This default does nothing."""


class SparseEdit(RowsEdit, HostEdit):
    """An edit of few logits, which the host knows."""

    @abstractmethod
    def places(self) -> Places:
        """Return which logits the edit changes: indices of rows and of tokens; at least one."""

    @abstractmethod
    def new_values(self, old_M: Any, params: RowParams, upload: Upload) -> Any:
        """Return the new values of the logits at ``places``, given their old ones ``old_M`` (float32).

        ``params``: [N].
        """

    def apply(self, logits_NV: Tensor, params: RowParams, upload: Upload) -> None:
        """Queue the change of the logits at ``places``, in three steps: gather, compute, scatter."""
        rows_M, ids_M = map(upload, self.places())
        logits_NV[rows_M, ids_M] = self.new_values(logits_NV[rows_M, ids_M], params, upload)

    def change(self, logits_NV: F32, params: RowParams) -> Undo:
        """Change the logits at ``places``, and return a function that restores all of them.

        Remembering these few takes less than a copy of a row.
        """
        places = tuple(self.places())
        old_M = logits_NV[places]
        logits_NV[places] = self.new_values(old_M, params, on_host)

        def undo() -> None:
            logits_NV[places] = old_M

        return undo


E = TypeVar("E", bound=RowsEdit | HostEdit, covariant=True)


class LogitEdit(ABC, Generic[E]):
    """One logit edit, with its state of every row of the request table."""

    every_token: ClassVar[bool] = True
    """Whether rows with this edit have it before each of their tokens."""

    @abstractmethod
    def start(self, init: RowInit) -> bool:
        """Replace the state that this edit keeps for the row ``init.row`` by the new request's.

        Return whether this edit may ever change the request's logits.
        """

    @abstractmethod
    def of(self, rows: I64, params: RowParams, positions: I64) -> E | None:
        """Return this edit's change for one step, in which the ``rows`` sample tokens at ``positions`` [N].

        None: it changes no row's logits.
        """


def find_edits(edits: Sequence[LogitEdit[E]], rows: I64, params: RowParams, positions: I64) -> tuple[E, ...]:
    """Return the changes of logits for one step, in which the ``rows`` sample tokens at ``positions`` [N].

    They are in the order of ``edits``, and empty for most steps.
    """
    too_short = positions - params["prompt_len"] < params["min_new_tokens"]
    if not (too_short.any() or params["penalised"].any()):
        return ()
    found = (edit.of(rows, params, positions) for edit in edits)
    return tuple(edit for edit in found if edit is not None)


@contextmanager
def edited(logits_NV: F32, params: RowParams, edits: Sequence[HostEdit]) -> Iterator[None]:
    """Change the logits on the host in place while the context lasts, by ``edits`` in order.

    ``params`` [N]: sampling parameters of the rows of logits. At its end, rows with log-probabilities have their
    original logits again, as these are computed from them.
    """
    # A logit that is not finite is found by the sampler.
    with np.errstate(invalid="ignore", over="ignore"):
        undos = [edit.change(logits_NV, params) for edit in edits]
    try:
        yield
    finally:
        for undo in reversed(undos):
            undo()
