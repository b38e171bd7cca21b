"""The part of a model that a process computes, and the KV pool for it.

All of it, or a tensor-parallel rank's. On a CPU the ranks of a host share one pool, each with its own heads of every
page. Ranks with a device each have pools of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ...mem_cache.kv_pages.region import KVRegion, allocate_region
from ...model_files.sharding import Shard
from ..cpu_engine.no_exchange import NoExchange, NoRoom
from ..kv.layout import HasKV
from ..kv.pools import PoolPlan, shares_pools
from ..options import WorkerOptions

if TYPE_CHECKING:
    import torch

    from ..cpu_engine.ranks import ExchangeRoom, NativeRanks
    from ..models.group import RankGroup


class Own(NamedTuple):
    """What a process knows before it makes a pool."""

    weight_bytes: int
    page_bytes: int
    plan_pools: Callable[[int], PoolPlan]
    """Chooses sizes of pools beside this many bytes of weights."""
    room: ExchangeRoom | NoRoom
    """Room for the longest pass of the C++ engine; none for a torch model."""
    identity: str
    """Description that all ranks must agree on."""


class Reserved(NamedTuple):
    """Room for the pool of a part."""

    plan: PoolPlan
    region: KVRegion | None = None
    """Memory of the pool; None on an accelerator, or if its pages have no bytes."""
    heads: tuple[int, int] | None = None
    """``[begin, end)`` of the pool's heads that are this part's; None: all."""
    exchange: NativeRanks | NoExchange = NoExchange()
    """Exchange of the C++ engine with the other ranks."""


class ModelPart(ABC):
    """What a process computes of a model, and what it shares for that with other processes."""

    kept: HasKV
    """What the pool keeps of the model."""
    windows: Mapping[int, int] = MappingProxyType({})
    """Layers that give pages back behind a window, and their windows."""
    shard: Shard | None = None
    """Part of the model; None: all of it."""
    shares_heads = False
    """Whether other ranks write the same keys and values to the pool."""

    @abstractmethod
    def group(self, device: torch.device) -> RankGroup:
        """Return the ranks that the torch model adds up its partial sums with, after connecting to them.

        Raises ``UnsupportedModel``.
        """

    @abstractmethod
    def reserve(self, own: Own) -> Reserved:
        """Choose the KV pool's size, which all ranks agree on, and reserve its memory on the host.

        ``own``: sizes of this process's weights and pages, and how to choose the pool's size from them. Raises
        ``ModelError``, ``RegionError`` or ``OSError``.
        """


class WholeModel(ModelPart):
    """All of a model, computed by one process."""

    def __init__(
        self, kept: HasKV, place: str, options: WorkerOptions, windows: Mapping[int, int] | None = None
    ) -> None:
        """Describe a whole model with KV of the sizes ``kept``, on the device that torch calls ``place``.

        ``windows``: sliding windows in tokens, by number of the layer, for layers that free pages older than their
        window.
        """
        self.kept = kept
        self.windows = windows or {}
        self._on_host = place == "cpu"
        self._is_shared = shares_pools(options)

    def group(self, device: torch.device) -> RankGroup:
        """Return ``alone``, the group of a single rank: a whole model exchanges nothing."""
        # Imported here: only torch models have one.
        from ..models.group import alone

        return alone

    def reserve(self, own: Own) -> Reserved:
        """Choose the pool's size beside this process's weights, and allocate its memory if it is on the host.

        ``own``: sizes of this process's weights and pages. Nothing is allocated for an accelerator, or if pages have no
        bytes: the result has no region then.
        """
        plan = own.plan_pools(own.weight_bytes)
        nbytes = plan.num_pages * own.page_bytes
        if not self._on_host or not nbytes:
            return Reserved(plan)
        return Reserved(plan, allocate_region(nbytes, shared=self._is_shared))
