"""Paged attention on the CPU by itself: what the engine runs inside, here to be tested and measured alone.

Shapes: T tokens, B entries, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, c_int32, c_int64, c_void_p

from torch import Tensor

from ..batch.forward_batch import ForwardBatch
from ..dtypes import dtype_name
from .library import NATIVE_DTYPES, load_library
from .pool_view import KernelPool, pass_entries, pool_view
from .structs import KVPoolView, Scoring, TokenRows
from .team import Team


class PagedAttention:
    """Causal attention over ``pool`` on a team's threads: ``plan`` once a pass, then ``run`` for each layer."""

    def __init__(
        self,
        pool: KernelPool,
        num_heads: int,
        team: Team,
        *,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Prepare attention of ``num_heads`` query heads over ``pool``, on the threads of ``team``.

        ``scale``: head_dim to the power of -1/2 if None. ``window``: tokens that a query sees; None: all. ``sinks``:
        [H]. Raises ``MemoryError``.
        """
        self._library = _declared(load_library())
        self._pool, self._view, self._team, self._num_heads = pool, pool_view(pool, num_heads), team, num_heads
        self._window = window or 0
        self._sinks = None if sinks is None else sinks.float().contiguous()
        self._scoring = Scoring(
            pool.group.head_dim**-0.5 if scale is None else scale,
            softcap or 0.0,
            None if self._sinks is None else self._sinks.data_ptr(),
        )
        self._plan = self._library.pds_attention_plan_new()
        if self._plan is None:
            raise MemoryError
        self.close = weakref.finalize(self, self._library.pds_attention_plan_free, self._plan)

    def plan(self, batch: ForwardBatch) -> None:
        """Divide the attention of a pass among the threads, before ``run`` for its layers. Keeps nothing of ``batch``.

        If ``batch`` has ``window_pages``, they lead to the pages of this pool. Raises ``MemoryError``.
        """
        entries, table = pass_entries(batch.rows.numpy(), batch.starts, batch.q_lens), batch.req_to_token
        status = self._library.pds_attention_prepare(
            self._plan,
            self._view,
            self._num_heads,
            self._window,
            entries.ctypes.data,
            len(entries),
            table.data_ptr(),
            table.stride(0),
            None if batch.window_pages is None else batch.window_pages.data_ptr(),
            self._team.size,
        )
        if status != 0:
            raise MemoryError

    def run(self, layer: int, q_THD: Tensor, out_THD: Tensor, layers: int = 1) -> None:
        """Compute the planned pass's attention of ``layer``, and write it to ``out_THD``.

        ``layers``: number of layers that are computed, one after another; more than 1 is for measurements.
        """
        q, out = _rows(q_THD), _rows(out_THD)
        self._library.pds_attention_run(self._plan, self._team.handle, layer, layer + layers, self._scoring, q, out)

    def store(self, layer: int, slots: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write the keys and values of T tokens to ``slots`` (int64 [T]) of the pool, in ``layer``.

        Slots are those of this pool; ``window_pages`` are not applied. Both have the same element type. Raises
        ``MemoryError``.
        """
        k, v = _rows(k_TKD), _rows(v_TKD)
        if self._library.pds_store_kv(self._view, layer, slots.data_ptr(), k, v, len(slots)) != 0:
            raise MemoryError


def _rows(x_THD: Tensor) -> TokenRows:
    if x_THD.stride()[1:] != (x_THD.shape[2], 1):
        raise ValueError("a token's heads must lie one after another")
    return TokenRows(x_THD.data_ptr(), NATIVE_DTYPES[dtype_name(x_THD.dtype)], x_THD.stride(0))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pool, rows = POINTER(KVPoolView), POINTER(TokenRows)
    entries = (c_void_p, c_int64, c_void_p, c_int64)
    for name, result, arguments in (
        ("pds_attention_plan_new", c_void_p, ()),
        ("pds_attention_plan_free", None, (c_void_p,)),
        ("pds_attention_prepare", c_int32, (c_void_p, pool, c_int64, c_int64, *entries, c_void_p, c_int32)),
        ("pds_attention_run", None, (c_void_p, c_void_p, c_int64, c_int64, POINTER(Scoring), rows, rows)),
        ("pds_store_kv", c_int32, (pool, c_int64, c_void_p, rows, rows, c_int64)),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
