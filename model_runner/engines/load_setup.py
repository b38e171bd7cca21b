"""What is known of a model before its engine is made, and what an engine's loading comes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ...messages.worker import KVOrder
from ...model_files.model_impl import ModelImpl
from ...model_files.model_path import ModelSource
from ...model_files.spec import ModelSpec
from ..device.base import Device
from ..device.placement import SPIN_US
from ..kv.layout import make_layout
from ..kv.pools import Pools
from ..loader.quantization import Quantization, QuantizedActivations
from ..options import WorkerOptions
from ..ranks.part import ModelPart
from .base import Engine
from .pool_maker import PoolMaker

if TYPE_CHECKING:
    from ..kv.sparse.channels import LabelChannels


@dataclass(frozen=True)
class Threads:
    """Where the calling thread computes; see ``ThreadPlacement``."""

    spin_us: int = SPIN_US
    cpus: tuple[int, ...] | None = None
    """Cores to compute on. None: any."""
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext
    """Within it compilers are started, which are not to inherit the thread's cores."""
    node: int | None = None
    """NUMA node of the cores; None: the host has one node, or the cores are on several."""
    count: int | None = None
    """Threads of the C++ engine; None: as many as torch computes with."""
    adapts: bool = False
    """Whether the C++ engine computes on fewer threads while other processes take their cores."""
    start_torch: Callable[[], object] = lambda: None
    """Starts torch's threads, before a torch engine's weights are loaded."""

    @property
    def team_size(self) -> int:
        """Number of threads that the C++ engine computes on. Imports torch if ``count`` is None."""
        if self.count is not None:
            return self.count
        import torch

        return torch.get_num_threads()


@dataclass(frozen=True)
class Setup:
    """What is known before the model's description is read."""

    options: WorkerOptions
    source: ModelSource
    implementation: ModelImpl
    device: Device
    dtype: str
    """Name of the type of weights and activations."""
    kv_dtype: str
    """Name of the type of the KV pool's elements."""
    threads: Threads
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds that the block takes to ``seconds[what]``.

        ``what``: name of a phase of loading, as "weights".
        """
        begin = time.monotonic()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - begin


class Native(NamedTuple):
    """A model that pdserve has an implementation of."""

    spec: ModelSpec
    identity: ModelSpec
    """Description by which instances recognise each other."""
    context_length: int
    part: ModelPart
    labels: LabelChannels | None

    def make_pool_maker(self, setup: Setup, order: KVOrder, page_cache_bytes: int = 0) -> PoolMaker:
        """Return the maker of this model's KV pools, with pages in ``order``.

        ``page_cache_bytes``: bytes of mapped weights that the kernel counts as free memory. The pools' size is chosen
        as if they were in use.
        """
        options, part = setup.options, self.part
        layout = make_layout(part.kept, options.page_size, setup.kv_dtype, order, part.windows, self.labels)
        sizes = (self.spec.vocab_size, self.context_length)
        return PoolMaker(options, setup.device, *sizes, part, layout, self.labels, page_cache_bytes)


class Loaded(NamedTuple):
    """What depends on the engine."""

    pools: Pools
    engine: Engine
    quantization: Quantization
    activations: QuantizedActivations | None
    fingerprint: str
    weight_bytes: int
    step_bytes: int = 0


def describe_for_ranks(setup: Setup, fingerprint: str, maker: PoolMaker, backend: str, level: str) -> str:
    """Return a text that is equal on all ranks of one instance if they serve the same, for ``HostRanks.agree``.

    ``backend``: name of the attention backend. ``level``: level of CPU instructions that the C++ engine uses.
    """
    options = setup.options
    kept = [group.dtype for group in maker.layout.groups]
    served = (fingerprint, backend, level, setup.dtype, kept, maker.context_length)
    sizes = (options.page_size, options.max_running_requests, options.max_prefill_tokens)
    return repr((*served, *sizes, options.chunked_prefill_size))
