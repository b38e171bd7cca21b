"""The common step in one call of the CPU kernels; see ``step.h`` for why."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.layers_done import NOT_COUNTED, PassProgress
from ..cpu_engine.library import check_size, load_library
from ..cpu_engine.structs import StepTables
from .common_steps import Chosen, RequestTables

if TYPE_CHECKING:
    from ...messages.worker import ForwardStep
    from ..cpu_engine.native_model import NativeModel

_LEFT, _OUT_OF_MEMORY = -1, -2


class NativeSteps:
    """Runs common steps on ``engine`` over the ``tables`` of a ``HostExecutor``, which are kept alive."""

    def __init__(self, engine: NativeModel, tables: RequestTables, *, clear_begun: bool) -> None:
        """Prepare to compute steps on ``engine`` over ``tables``, which are kept alive. Raises ``MemoryError``.

        ``clear_begun``: zero the pages that a pass begins and does not fill, because a peer may read them whole.
        """
        req_to_token, last_tokens, params, window_pages = tables
        library = load_library()
        check_size(library, "RowParams", params.itemsize)
        self._engine, self._kept = engine, tables
        rows, columns = req_to_token.shape
        step_tables = StepTables(
            req_to_token.ctypes.data,
            rows,
            columns,
            last_tokens.ctypes.data,
            params.ctypes.data,
            engine.num_slots,
            None if window_pages is None else window_pages.ctypes.data,
            clear_begun,
            engine.shares_heads,
        )
        self._handle = library.pds_stepper_new(engine.handle, engine.team.handle, step_tables)
        if self._handle is None:
            raise MemoryError
        self.close = weakref.finalize(self, library.pds_stepper_free, self._handle)
        self._run = library.pds_stepper_run
        self._tokens = np.empty(rows, dtype=np.int32)
        self._finite = np.empty(rows, dtype=np.bool_)
        self._results = (self._tokens.ctypes.data, self._finite.ctypes.data)

    def run(self, step: ForwardStep, done: PassProgress = NOT_COUNTED) -> Chosen | None:
        """Compute the whole ``step`` in one call of the CPU kernels, and return the tokens that it chose.

        ``done`` counts the layers that are computed. Return None, with nothing changed, if the step has to be computed
        part by part. That is so if the step asks for more than tokens, or contradicts itself or the ``RequestTables``.
        Raises ``MemoryError``.
        """
        entries, tokens = len(step.rows) // 4, len(step.input_ids) // 4
        per_entry = (step.rows, step.starts, step.q_lens, step.use_last, step.sample)
        per_token = (step.input_ids, step.out_cache_loc)
        if step.input_logprobs or step.readouts or not 0 < entries <= len(self._tokens):
            return None
        if any(len(a) != 4 * entries for a in per_entry) or any(len(a) != 4 * tokens for a in per_token):
            return None
        self._engine.check_size(tokens)
        ropes = self._engine.ropes
        self._engine.team.begin_pass()
        count = self._run(
            self._handle,
            entries,
            tokens,
            *per_entry,
            *per_token,
            ropes.tables,
            ropes.positions,
            *self._results,
            done.address,
        )
        if count == _LEFT:
            return None
        if count == _OUT_OF_MEMORY:
            raise MemoryError(f"no memory for a pass of {tokens} tokens")
        return Chosen(self._tokens[:count].tobytes(), self._finite[:count])
