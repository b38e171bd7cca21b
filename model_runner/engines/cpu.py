"""The C++ engine: whole passes, and common steps, in one call of the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable

from ...model_files.spec import ModelSpec
from ..batch.host_batch import HostBatch
from ..batch.step_plan import begun_tokens
from ..cpu_engine.native_engine import Ranks
from ..cpu_engine.native_model import NativeModel
from ..cpu_engine.packed_model import PackedModel
from ..cpu_engine.team import Team
from ..dtypes import DType
from ..kv.pools import Pools
from ..sampling.native import NativeSampler
from ..sampling.row_params import F32
from ..steps.common_steps import CommonSteps, RequestTables
from ..steps.native_steps import NativeSteps
from .base import Engine, WithoutWeights


class CpuEngine(Engine):
    """Computes with weights that are packed for the CPU kernels, where they are mapped."""

    attention_backend = "cpu"

    def __init__(
        self,
        packed: PackedModel,
        spec: ModelSpec,
        dtype: DType,
        pools: Pools,
        team: Team,
        ranks: Ranks,
        reload: Callable[[], PackedModel],
        *,
        clears_begun_pages: bool,
    ) -> None:
        """Compute with the weights ``packed``, with activations of ``dtype``, on the threads of ``team``.

        ``reload`` maps the same weights again, after they were dropped. ``ranks``: this rank's part and its exchange
        with the other tensor-parallel ranks; ``packed`` and ``spec`` are this rank's part. ``clears_begun_pages``: see
        ``Engine``.
        """
        super().__init__(pools, clears_begun_pages=clears_begun_pages)
        self.team = team
        self.sampler = NativeSampler(team)
        self._spec = spec
        self._dtype = dtype
        self._ranks = ranks
        self._reload = reload
        self.native: NativeModel | None = None
        """Model on the kernels; None while its weights are dropped."""
        self._use(packed)

    def host_logits(self, batch: HostBatch) -> F32:
        """Compute the pass in one call of the CPU kernels, write its KV, and return the wanted logits, [L, V].

        Raises ``WithoutWeights`` while the weights are dropped.
        """
        if self.native is None:
            raise WithoutWeights
        if self._clears:
            self._clear_begun_pages(batch)
            if self.native.shares_heads:
                # A rank that is late must not clear what another one has written.
                self.native.meet()
        return self.native.forward(batch)

    def common_steps(self, tables: RequestTables) -> CommonSteps:
        """Return steps that the CPU kernels compute in one call, over ``tables``.

        While the weights are dropped, return ``ALL_GENERAL``, which leaves every step to be computed part by part.
        """
        if self.native is None:
            return super().common_steps(tables)
        return NativeSteps(self.native, tables, clear_begun=self._clears)

    def weight_bytes_read(self) -> int:
        """Return the bytes of weights that the CPU kernels read in the last pass; 0 while the weights are dropped."""
        return 0 if self.native is None else sum(self.native.weight_bytes_read().values())

    def drop_weights(self) -> None:
        """Drop the native model and its mapping of the weights. Later passes raise ``WithoutWeights``."""
        self.native = None

    def take_weights(self) -> None:
        """Map the packed weights again, after ``drop_weights``, and compute with them from now on.

        Raises ``InvalidWeights`` if they are other weights now.
        """
        self._use(self._reload())

    def _use(self, packed: PackedModel) -> None:
        native = NativeModel(packed, self._spec, self._dtype, self._pools.blocks, self.team, self._ranks)
        self.native = native
        self.step_weight_bytes = native.weight_bytes

    def _clear_begun_pages(self, batch: HostBatch) -> None:
        begun_at, size = batch.begun_at, self._pools.page_size
        if begun_at is None:
            begun_at = begun_tokens(batch.starts, batch.q_lens, size)
        pages = batch.out_cache_loc[begun_at] // size
        kept, *windowed = self._pools.blocks
        kept.clear(pages)
        if windowed and batch.window_pages is not None:
            windowed[0].clear(batch.window_pages[pages])
