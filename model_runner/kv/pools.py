"""The KV pools of a model: how many pages they have, and the memory that they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...mem_cache.kv_pages.region import KVRegion, allocate_region
from ...messages.worker import KVLayout
from ...runtime.machine.memory import Memory
from ...runtime.transfer_backends import BACKENDS
from ..options import WorkerOptions
from .block_pool import BlockPool
from .size import choose_pools

if TYPE_CHECKING:
    from .pool import KVPool
    from .sparse.channels import LabelChannels


class PoolPlan(NamedTuple):
    """Sizes of pools."""

    num_pages: int
    """Pages that are reserved, page 0 included."""
    max_total_tokens: int = 0
    """Slots to hand out at first, page 0 excluded; 0: all that are reserved."""
    num_window_pages: int = 0
    """Pages of the layers that attend to a window, page 0 included; 0 without such layers."""


def plan_pools(
    options: WorkerOptions,
    layout: KVLayout,
    context_length: int,
    weight_bytes: int,
    memory: Memory,
    device_type: str,
    step_bytes: int,
) -> PoolPlan:
    """Return the number of pages and slots of the KV pools that fit into the device's memory beside loaded weights.

    ``memory``: the device's, with the weights loaded. ``step_bytes``: memory of an accelerator to leave free for steps.
    Raises ``ModelError`` if too little is free or an option is impossible.
    """
    tokens, reserved = choose_pools(options, layout, context_length, weight_bytes, memory, device_type, step_bytes)
    num_window_pages = reserved.windowed // options.page_size + 1 if reserved.windowed else 0
    return PoolPlan(reserved.kept // options.page_size + 1, tokens, num_window_pages)


def shares_pools(options: WorkerOptions) -> bool:
    """Return whether the transfer backend needs the pools in shared memory, so that other processes can map them."""
    return BACKENDS[options.disaggregation_transfer_backend].needs_shared_memory


@dataclass(frozen=True, eq=False)
class Pools:
    """KV pools of one model, and what is handed out of them."""

    layout: KVLayout
    plan: PoolPlan
    by_group: Sequence[BlockPool | KVPool]
    """Pool of each page group: of the layers that keep their pages, then of those that attend to a window, if any."""
    regions: Sequence[KVRegion | None]
    """Memory of each pool as one buffer; None on an accelerator, or if its pages have no bytes."""

    @property
    def blocks(self) -> list[BlockPool]:
        """Pools in the C++ engine's order, one for each page group; empty with a torch engine."""
        return [pool for pool in self.by_group if isinstance(pool, BlockPool)]

    @property
    def tensors(self) -> list[KVPool]:
        """Pools of a torch engine, one for each page group; empty with the C++ engine."""
        return [pool for pool in self.by_group if not isinstance(pool, BlockPool)]

    @property
    def pool(self) -> BlockPool | KVPool:
        """Pool of the layers that keep all of a request's pages, the first page group."""
        return self.by_group[0]

    @property
    def region(self) -> KVRegion | None:
        """Host memory of ``pool`` as one buffer; None on an accelerator, or if its pages have no bytes."""
        return self.regions[0]

    @property
    def page_size(self) -> int:
        """Number of tokens in a page."""
        return self.layout.page_size

    @property
    def num_slots(self) -> int:
        """Number of slots that memory or addresses are reserved for, page 0 included."""
        return self.plan.num_pages * self.page_size

    @property
    def limit_tokens(self) -> int:
        """Number of slots that the pool can grow to, page 0 excluded."""
        return self.num_slots - self.page_size

    @property
    def max_total_tokens(self) -> int:
        """Number of slots that the scheduler may use from the start, page 0 excluded."""
        return min(self.plan.max_total_tokens or self.limit_tokens, self.limit_tokens)

    @property
    def num_window_pages(self) -> int:
        """Number of pages of the windowed layers' pool, page 0 included; 0 without one."""
        return self.plan.num_window_pages

    @property
    def max_window_tokens(self) -> int:
        """Number of usable slots of the windowed layers' pool, page 0 excluded; 0 without one."""
        return max(0, self.num_window_pages - 1) * self.page_size


def make_pools(
    layout: KVLayout,
    plan: PoolPlan,
    place: str,
    labels: LabelChannels | None = None,
    region: KVRegion | None = None,
    heads: tuple[int, int] | None = None,
    *,
    is_shared: bool = False,
) -> Pools:
    """Make the KV pool, and the windowed layers' pool if the plan has one.

    ``region``: memory for the KV pool alone; None: it gets memory of its own. ``place``: device of the memory, as torch
    names it. ``heads``: this rank's KV heads ``[begin, end)``, None for all. ``is_shared``: whether other processes map
    the window pool.

    On a CPU the window pool gets a region. Its memory is committed as it is touched, unlike that of a tensor of zeros.
    """
    pool = _make_pool(layout, plan.num_pages, place, region, heads, labels=labels)
    if not plan.num_window_pages:
        return Pools(layout, plan, [pool], [region])
    window_region = None
    if place == "cpu":
        window_region = allocate_region(plan.num_window_pages * layout.groups[1].page_bytes, shared=is_shared)
    window_pool = _make_pool(layout, plan.num_window_pages, place, window_region, group=1)
    return Pools(layout, plan, [pool, window_pool], [region, window_region])


def make_smallest_pools(layout: KVLayout, place: str, labels: LabelChannels | None) -> Pools:
    """Make a pool of page 0 alone for each page group, for measuring steps before the real pools are sized."""
    pools = [_make_pool(layout, 1, place, group=group, labels=labels) for group in range(len(layout.groups))]
    return Pools(layout, PoolPlan(1, 0, len(pools) - 1), pools, [None] * len(pools))


def _make_pool(
    layout: KVLayout,
    num_pages: int,
    place: str,
    region: KVRegion | None = None,
    heads: tuple[int, int] | None = None,
    group: int = 0,
    labels: LabelChannels | None = None,
) -> BlockPool | KVPool:
    buffer = None if region is None else region.buffer
    if layout.order == "blocks":
        # No other engine than the C++ one reads that order.
        return BlockPool(layout, num_pages, buffer, heads, group)
    import torch

    from .pool import make_pool

    return make_pool(layout, num_pages, torch.device(place), buffer, heads, group, labels)
