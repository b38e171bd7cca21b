"""Measures what the steps of a model take of an accelerator's memory, before its pools are sized."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import NamedTuple

from ..device.base import Device
from ..grammar.matchers import NoMatchers
from ..kv.pools import Pools, make_smallest_pools
from ..kv.size import GIB
from ..steps.step_memory import GRAPH_BYTES, StepSizes, bytes_of_steps
from ..steps.step_runner import StepRunner
from .pool_maker import PoolMaker
from .torch import AttentionEngine

log = logging.getLogger(__name__)


class _Trial(NamedTuple):
    """The model that steps are measured with."""

    vocab_size: int
    context_length: int
    device: Device
    pools: Pools
    engine: AttentionEngine
    matchers: NoMatchers = NoMatchers()


def measure_step_bytes(maker: PoolMaker, make_engine: Callable[[Pools], AttentionEngine]) -> int:
    """Return how many bytes of an accelerator steps take beside weights and KV pools, by running the largest steps.

    Their KV goes to pools of page 0 alone. Return 0 on a CPU, where nothing is measured. Raises ``NotEnoughMemory``.
    """
    if not maker.device.beside:
        return 0
    try:
        step_bytes = _measure(maker, make_engine)
    finally:
        gc.collect()
    log.info("steps take up to %.2f GiB beside weights and KV pool", step_bytes / GIB)
    return step_bytes


def _measure(maker: PoolMaker, make_engine: Callable[[Pools], AttentionEngine]) -> int:
    options, device, context_length = maker.options, maker.device, maker.context_length
    pools = make_smallest_pools(maker.layout, device.place, maker.labels)
    graphs: list[int] = []

    def make() -> tuple[StepRunner, StepSizes]:
        engine = make_engine(pools)
        graphs.extend(engine.graph_sizes)
        # Graphs share their memory, and the largest takes most. The allocator does not know of the driver's part.
        engine.graph_sizes = engine.graph_sizes[-1:]
        sizes = StepSizes.of(options, device.kind, context_length, engine.gathered_tokens)
        model = _Trial(maker.vocab_size, context_length, device, pools, engine)
        return StepRunner(model, options.max_running_requests), sizes

    return bytes_of_steps(device, make) + len(graphs) * GRAPH_BYTES
