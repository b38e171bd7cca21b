"""Makes the KV pools of a model, beside its weights and what its steps take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...messages.worker import KVLayout
from ..cpu_engine.no_exchange import NO_ROOM, NoExchange, NoRoom
from ..device.base import Device
from ..kv.pools import PoolPlan, Pools, make_pools, plan_pools, shares_pools
from ..options import WorkerOptions
from ..ranks.part import ModelPart, Own

if TYPE_CHECKING:
    from ..cpu_engine.ranks import ExchangeRoom, NativeRanks
    from ..kv.sparse.channels import LabelChannels


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

    def make(
        self, weight_bytes: int, step_bytes: int = 0, identity: str = "", room: ExchangeRoom | NoRoom = NO_ROOM
    ) -> tuple[Pools, NativeRanks | NoExchange]:
        """Make the KV pools, with a size that fits beside loaded weights, and the exchange with other ranks.

        Waits for the other ranks; a model without any gets ``NoExchange``. ``weight_bytes``: the weights' memory.
        ``step_bytes``: memory of an accelerator to leave free for steps. ``identity``: text that all ranks must agree
        on. ``room``: size of the longest pass, for the C++ engine's exchange. Raises ``ModelError``, ``RegionError`` or
        ``OSError``.
        """
        page_bytes = self.layout.groups[0].page_bytes
        reserved = self.part.reserve(Own(weight_bytes, page_bytes, partial(self._plan, step_bytes), room, identity))
        pools = make_pools(
            self.layout,
            reserved.plan,
            self.device.place,
            self.labels,
            reserved.region,
            reserved.heads,
            is_shared=shares_pools(self.options),
        )
        return pools, reserved.exchange

    def _plan(self, step_bytes: int, weight_bytes: int) -> PoolPlan:
        memory, kind = self.device.memory(), self.device.kind
        memory = memory._replace(free=max(0, memory.free - self.page_cache_bytes))
        return plan_pools(self.options, self.layout, self.context_length, weight_bytes, memory, kind, step_bytes)
