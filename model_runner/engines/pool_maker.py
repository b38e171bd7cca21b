"""Makes the KV pools of a model, beside its weights and what its steps take."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...messages.worker import KVLayout
from ..cpu_engine.no_exchange import NO_ROOM, NoExchange, NoRoom
from ..device.base import Device
from ..kv.pools import PoolPlan, Pools, make_pools, make_smallest_pools, plan_pools, shares_pools
from ..kv.size import GIB
from ..kv.sparse.channels import LabelChannels
from ..options import WorkerOptions
from ..ranks.part import ModelPart, Own
from ..steps.step_memory import GRAPH_BYTES, StepSizes, bytes_of_steps
from ..steps.step_runner import StepRunner
from .torch import AttentionEngine

if TYPE_CHECKING:
    from ..cpu_engine.ranks import ExchangeRoom, NativeRanks

log = logging.getLogger(__name__)


class _Trial(NamedTuple):
    """The model that steps are measured with."""

    vocab_size: int
    context_length: int
    device: Device
    pools: Pools
    engine: AttentionEngine


@dataclass(frozen=True)
class PoolMaker:
    """Makes the pools of one model, or of the part of it that a rank computes."""

    options: WorkerOptions
    device: Device
    vocab_size: int
    context_length: int
    part: ModelPart
    layout: KVLayout
    labels: LabelChannels | None = None
    page_cache_bytes: int = 0
    """Bytes of mapped weights that the kernel counts as free, because it could read them again."""

    def measure_steps(self, make_engine: Callable[[Pools], AttentionEngine]) -> int:
        """Return the bytes of an accelerator that steps take, by steps over pools of page 0 alone.

        0 on a CPU, where nothing is measured.
        """
        if not self.device.beside:
            return 0
        try:
            step_bytes = self._measure(make_engine)
        finally:
            gc.collect()
        log.info("steps take up to %.2f GiB beside weights and KV pool", step_bytes / GIB)
        return step_bytes

    def make(
        self, weight_bytes: int, step_bytes: int = 0, identity: str = "", room: ExchangeRoom | NoRoom = NO_ROOM
    ) -> tuple[Pools, NativeRanks | NoExchange]:
        """Make the pools beside weights that are loaded, and the C++ engine's exchange with other ranks.

        ``identity`` and ``room``: see ``Own``. Raises ``ModelError``, ``RegionError`` and ``OSError``.
        """
        page_bytes = self.layout.groups[0].page_bytes
        reserved = self.part.reserve(Own(weight_bytes, page_bytes, partial(self._plan, step_bytes), room, identity))
        pools = make_pools(
            self.layout,
            reserved.plan,
            self.device.torch,
            self.labels,
            reserved.region,
            reserved.heads,
            is_shared=shares_pools(self.options),
        )
        return pools, reserved.exchange

    def _measure(self, make_engine: Callable[[Pools], AttentionEngine]) -> int:
        options, device, context_length = self.options, self.device, self.context_length
        pools = make_smallest_pools(self.layout, device.torch, self.labels)
        graphs: list[int] = []

        def make() -> tuple[StepRunner, StepSizes]:
            engine = make_engine(pools)
            graphs.extend(engine.graph_sizes)
            # Graphs share their memory, and the largest takes most. The allocator does not know of the driver's part.
            engine.graph_sizes = engine.graph_sizes[-1:]
            sizes = StepSizes.of(options, device.torch.type, context_length, gathers=engine.gathers)
            model = _Trial(self.vocab_size, context_length, device, pools, engine)
            return StepRunner(model, options.max_running_requests), sizes

        return bytes_of_steps(device, make) + len(graphs) * GRAPH_BYTES

    def _plan(self, step_bytes: int, weight_bytes: int) -> PoolPlan:
        memory, kind = self.device.memory(), self.device.torch.type
        memory = memory._replace(free=max(0, memory.free - self.page_cache_bytes))
        return plan_pools(self.options, self.layout, self.context_length, weight_bytes, memory, kind, step_bytes)
