"""The parts of a model that tensor-parallel ranks compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..device.base import Device
from .host_ranks import HostRanks
from .part import ModelPart, Own, Reserved

if TYPE_CHECKING:
    import torch

    from ..models.group import RankGroup


class _RankPart(ModelPart):
    """A rank's part of a model. Raises ``UnsupportedModel`` if the model can't be divided."""

    def __init__(self, spec: ModelSpec, ranks: HostRanks) -> None:
        self._spec = spec
        self._ranks = ranks
        self.shard: Shard = ranks.shard(spec)

    def group(self, device: torch.device) -> RankGroup:
        """Connect to the other ranks, and return their torch.distributed group for this vocabulary and ``device``."""
        return self._ranks.join().torch_ranks(self._spec.vocab_size, device)


class PartInSharedPool(_RankPart):
    """The part of a rank that shares the pool with the other ranks of its host."""

    def __init__(self, spec: ModelSpec, ranks: HostRanks) -> None:
        super().__init__(spec, ranks)
        self.kept = ranks.kept(spec)
        self.shares_heads = self.shard.shares_kv_heads

    def reserve(self, own: Own) -> Reserved:
        """Make or map the host's shared pool, and return it with this rank's heads and its exchange.

        Waits for the other ranks of the host.
        """
        plan, region, exchange = self._ranks.share(own)
        return Reserved(plan, region, self._ranks.own_heads(self.shard.whole), exchange)


class PartOnDevice(_RankPart):
    """The part of a rank that has a device, and a pool on it, of its own."""

    def __init__(self, spec: ModelSpec, ranks: HostRanks, device: Device) -> None:
        super().__init__(spec, ranks)
        self.kept = ranks.kept_apart(spec)
        self._device_name = device.name

    def reserve(self, own: Own) -> Reserved:
        """Return the plan of this rank's own pool, on its device; wait for all ranks.

        Every rank gets the number of pages that the device with the least room allows. No memory is allocated here.
        Raises ``UnsupportedModel`` if the ranks don't serve the same.
        """
        plan = own.plan_pools(own.weight_bytes)
        pages = self._ranks.agree(plan.num_pages, f"{own.identity} {self._device_name}")
        return Reserved(plan._replace(num_pages=pages))
