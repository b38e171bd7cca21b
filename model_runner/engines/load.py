"""Loads a model, and chooses the engine that computes it.

In this order: description → device and types → weights → KV pools → engine. The attention backend "cpu" stands for the
C++ engine, which has weights of its own. A model that transformers' own class computes (``--model-impl``) is described
by a pass of itself, after its weights are loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...messages.worker import KVOrder
from ...model_files.context_length import choose_context_length, with_context, without_idle_windows
from ...model_files.errors import InvalidWeights, UnsupportedModel
from ...model_files.foreign_config import read_foreign
from ...model_files.model_impl import ModelImpl, choose_model_impl
from ...model_files.model_path import ModelSource, commit_of, resolve_model
from ...model_files.spec import ModelSpec
from ...model_files.spec_reader import read_spec
from ..cpu_engine.packed_model import PackedModel
from ..device.base import Device
from ..device.choice import choose_device, choose_dtype, choose_kv_dtype, open_device
from ..device.placement import SPIN_US
from ..dtypes import dtype_name
from ..kv.pool import make_layout
from ..kv.pools import Pools
from ..kv.quantization import LARGEST
from ..kv.size import layers_apart
from ..kv.sparse.channels import LabelChannels, choose_channels
from ..loader.load import foreign_fingerprint
from ..loader.quantization import Quantization, QuantizedActivations
from ..loader.weight_loader import OTHER_WEIGHTS, WeightLoader
from ..models.transformers.refusals import refuse_for_transformers
from ..options import WorkerOptions
from ..ranks.part import ModelPart, WholeModel
from .attention_choice import choose_attention_backend
from .base import Engine
from .loaded import LoadedModel
from .pool_maker import PoolMaker
from .torch import TorchEngine, WrapLayer

if TYPE_CHECKING:
    from ..ranks.host_ranks import HostRanks
    from ..weights_cache.cache import WeightsSource
    from ..weights_cache.request import PackRequest

log = logging.getLogger(__name__)

LEAST_ROOM = 4096
"""Tokens that ranks can compute at once, whatever the options: what start-up measures with is as long."""


@dataclass(frozen=True)
class Threads:
    """Where the calling thread computes; see ``Placement``."""

    spin_us: int = SPIN_US
    cpus: tuple[int, ...] | None = None
    """Cores to compute on; the calling thread is bound to the first already. None: any."""
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext
    """Within it compilers are started, which are not to inherit the thread's cores."""
    node: int | None = None
    """NUMA node of the cores; None: the host has one node, or the cores are on several."""


@dataclass(frozen=True)
class _Setup:
    """What is known before the model's description is read."""

    options: WorkerOptions
    source: ModelSource
    implementation: ModelImpl
    device: Device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    wrap_layer: WrapLayer | None
    """Gives each layer's computation a name for profilers (``--enable-nvtx``); None: it has none."""
    weights_source: WeightsSource
    """Where the C++ engine gets its weights from."""
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds that the block takes to those of ``what``."""
        begin = time.monotonic()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - begin


def load_model(
    options: WorkerOptions,
    threads: Threads | None = None,
    ranks: HostRanks | None = None,
    weights_source: WeightsSource | None = None,
) -> LoadedModel:
    """Load the model, or the part of it that a rank computes. ``ranks``: the rank that this is, None: the only one.

    ``weights_source``: where the C++ engine gets its weights from; None: they are packed here. Raises ``ModelError`` if
    the model can't be served as asked.
    """
    begin = time.monotonic()
    source = resolve_model(options.model_path, revision=options.revision, weights=options.load_format != "dummy")
    if (commit := commit_of(source)) is not None:
        log.info("%s is that of commit %s", options.model_path, commit)
    implementation = choose_model_impl(options.model_impl, source)
    chosen = choose_device(options.device, options.base_gpu_id + (0 if ranks is None else ranks.place.local))
    device = open_device(chosen, strict=options.fail_on_host_sync)
    dtype = choose_dtype(options.dtype, chosen)
    kv_dtype = choose_kv_dtype(options.kv_cache_dtype, dtype)
    wrap_layer = None
    if options.enable_nvtx:
        from ..steps.step_ranges import name_layers

        wrap_layer = name_layers(chosen)
    source_of_weights = weights_source or _pack_here()
    setup = _Setup(options, source, implementation, device, dtype, kv_dtype, wrap_layer, source_of_weights)
    setup.seconds["config"] = time.monotonic() - begin
    if implementation is ModelImpl.TRANSFORMERS:
        return _load_transformers(setup)
    return _load_native(setup, threads or Threads(), ranks)


def _load_native(setup: _Setup, threads: Threads, ranks: HostRanks | None) -> LoadedModel:
    options, device, timed = setup.options, setup.device, setup.timed
    with timed("config"):
        described = read_spec(setup.source)
        context_length = choose_context_length(described, options.context_length)
        # What tells instances apart; a window that no sequence outgrows is no difference to this one alone.
        identity = with_context(described, context_length)
        spec = without_idle_windows(identity)
        _refuse_kv_dtype(spec, setup)
        labels = choose_channels(options, spec)
    part = _choose_part(spec, ranks, device, options)
    with timed("kernels"), threads.compiling():
        own = spec if part.shard is None else part.shard.spec
        backend = choose_attention_backend(options.attention_backend, own, device.torch, setup.dtype, setup.kv_dtype)
    log.info("model implementation: native, family %s", spec.family)
    native = _Native(spec, identity, context_length, part, labels)
    loading = _load_for_kernels(setup, native, threads) if backend == "cpu" else _load_torch(setup, native, backend)
    return LoadedModel(
        implementation=setup.implementation,
        spec=spec,
        context_length=context_length,
        vocab_size=spec.vocab_size,
        device=device,
        dtype=setup.dtype,
        quantization=loading.quantization,
        quantized_activations=loading.activations,
        fingerprint=loading.fingerprint,
        weight_bytes=loading.weight_bytes,
        step_bytes=loading.step_bytes,
        pools=loading.pools,
        engine=loading.engine,
        load_seconds=setup.seconds,
    )


def _choose_part(spec: ModelSpec, ranks: HostRanks | None, device: Device, options: WorkerOptions) -> ModelPart:
    """Return the part of ``spec`` that this process computes. ``ranks``: the rank that it is, None: the only one.

    Raises ``UnsupportedModel``.
    """
    if ranks is None:
        return WholeModel(spec, device.torch, options, layers_apart(options, spec))
    # Imported here: they import torch.distributed.
    from ..ranks.on_devices import refuse_on_devices
    from ..ranks.rank_parts import PartInSharedPool, PartOnDevice

    if device.beside:
        refuse_on_devices(options, ranks.place)
        return PartOnDevice(spec, ranks, device)
    return PartInSharedPool(spec, ranks)


class _Native(NamedTuple):
    """A model that pdserve has an implementation of."""

    spec: ModelSpec
    identity: ModelSpec
    """Description by which instances recognise each other."""
    context_length: int
    part: ModelPart
    labels: LabelChannels | None


class _Loaded(NamedTuple):
    """What depends on the engine."""

    pools: Pools
    engine: Engine
    quantization: Quantization
    activations: QuantizedActivations | None
    fingerprint: str
    weight_bytes: int
    step_bytes: int = 0


def _pack_here() -> WeightsSource:
    # Imported here: a worker packs in another process.
    from ..weights_cache.cache import PrivateWeights
    from ..weights_cache.local_builder import LocalBuilder

    return PrivateWeights(LocalBuilder(torch.get_num_threads()))


def _make_pool_maker(setup: _Setup, native: _Native, order: KVOrder) -> PoolMaker:
    options, part = setup.options, native.part
    layout = make_layout(part.kept, options.page_size, setup.kv_dtype, order, part.windows, native.labels)
    return PoolMaker(options, setup.device, native.spec.vocab_size, native.context_length, part, layout, native.labels)


def _load_for_kernels(setup: _Setup, native: _Native, threads: Threads) -> _Loaded:
    # Imported here: they load the compiled kernels.
    from ..cpu_engine.build import choose_level
    from ..cpu_engine.native_engine import Ranks
    from ..cpu_engine.ranks import ExchangeRoom
    from ..cpu_engine.team import Team
    from ..weights_cache.request import PackRequest
    from .cpu import CpuEngine

    options, shard = setup.options, native.part.shard
    with setup.timed("weights"):
        dtypes = (dtype_name(setup.dtype), dtype_name(setup.kv_dtype))
        request = PackRequest(options, setup.source, native.spec, native.identity, shard, *dtypes, threads.node)
        packed = setup.weights_source.open(request)
    contents = packed.contents
    with setup.timed("kv_pool"):
        maker = replace(_make_pool_maker(setup, native, "blocks"), page_cache_bytes=packed.memory.page_cache)
        # For the longest pass that there can be.
        uncut = native.context_length if options.chunked_prefill_size == -1 else 0
        prompts = max(options.max_prefill_tokens, uncut, LEAST_ROOM)
        room = ExchangeRoom(prompts + options.max_running_requests, native.spec.hidden_size, native.spec.vocab_size)
        identity = _identity(setup, contents.fingerprint, maker, "cpu", choose_level().name)
        pools, exchange = maker.make(packed.memory.total, identity=identity, room=room)
    with setup.timed("kernels"):
        team = Team(torch.get_num_threads(), threads.cpus, threads.spin_us)
        engine = CpuEngine(
            packed,
            request.own_spec,
            setup.dtype,
            pools,
            team,
            Ranks(shard, exchange),
            partial(_PackedWeights(setup.weights_source, request).reopen, contents.fingerprint),
            clears_begun_pages=options.hands_over,
        )
    found = (contents.quantization, contents.activations, contents.fingerprint)
    return _Loaded(pools, engine, *found, packed.memory.total)


class _PackedWeights(NamedTuple):
    """The packed weights of one model, mapped once, and again after they were dropped."""

    source: WeightsSource
    request: PackRequest

    def reopen(self, expected: str) -> PackedModel:
        """Map the weights again; raise ``InvalidWeights`` if their fingerprint is not the ``expected`` one."""
        packed = self.source.open(self.request)
        if packed.contents.fingerprint != expected:
            raise InvalidWeights(OTHER_WEIGHTS)
        return packed


def _load_torch(setup: _Setup, native: _Native, backend: str) -> _Loaded:
    options, device, part = setup.options, setup.device, native.part
    with setup.timed("weights"):
        loader = WeightLoader(
            *(options, setup.source, native.spec, native.identity, setup.dtype, device.torch, part.shard),
            is_native=False,
            find_group=partial(part.group, device.torch),
        )
        weights = loader.load()
    maker = _make_pool_maker(setup, native, "tokens")

    def make_engine(pools: Pools) -> TorchEngine:
        return TorchEngine(
            weights,
            pools,
            backend,
            device,
            options,
            native.context_length,
            partial(loader.reload, weights.fingerprint),
            shares_heads=part.shares_heads,
            wrap_layer=setup.wrap_layer,
        )

    with setup.timed("kv_pool"):
        step_bytes = maker.measure_steps(make_engine)
        identity = _identity(setup, weights.fingerprint, maker, backend, "")
        pools, _ = maker.make(weights.nbytes, step_bytes, identity)
    with setup.timed("kernels"):
        engine = make_engine(pools)
    found = (weights.quantization, weights.activations, weights.fingerprint)
    return _Loaded(pools, engine, *found, weights.nbytes, step_bytes)


def _identity(setup: _Setup, fingerprint: str, maker: PoolMaker, backend: str, level: str) -> str:
    """Describe what ranks on several hosts must have in common."""
    options = setup.options
    kept = [group.dtype for group in maker.layout.groups]
    served = (fingerprint, backend, level, setup.dtype, kept, maker.context_length)
    sizes = (options.page_size, options.max_running_requests, options.max_prefill_tokens)
    return repr((*served, *sizes, options.chunked_prefill_size))


def _refuse_kv_dtype(spec: ModelSpec, setup: _Setup) -> None:
    if spec.latent_dim is not None and setup.kv_dtype in LARGEST:
        raise UnsupportedModel(
            f"--kv-cache-dtype {setup.options.kv_cache_dtype} is not supported for latent attention (MLA); "
            "leave it out, or choose bfloat16"
        )


def _load_transformers(setup: _Setup) -> LoadedModel:
    options, source, device, timed = setup.options, setup.source, setup.device, setup.timed
    with timed("config"):
        described = read_foreign(source)
        context_length = choose_context_length(described, options.context_length)
        refuse_for_transformers(options)
    with timed("imports"):
        # Imported here: it takes seconds, and native models need none of it.
        from ..models.transformers.loading import LoadRequest, load_transformers_model
        from .transformers import TransformersEngine
    with timed("weights"):
        folder, seed = source.path, options.random_seed
        loading = LoadRequest(folder, described, context_length, setup.dtype, device.torch, options.load_format, seed)
        loaded = load_transformers_model(loading)
        fingerprint = foreign_fingerprint(loaded.config, loaded.weights)
        weight_bytes = sum(tensor.nbytes for tensor in loaded.weights.values())

    def make_engine(pools: Pools) -> TransformersEngine:
        return TransformersEngine(loaded.model, weight_bytes, pools, device, setup.dtype, options)

    with timed("kv_pool"):
        layout = make_layout(loaded.shape, options.page_size, setup.kv_dtype)
        part = WholeModel(loaded.shape, device.torch, options)
        maker = PoolMaker(options, device, described.vocab_size, context_length, part, layout)
        step_bytes = maker.measure_steps(make_engine)
        pools, _ = maker.make(weight_bytes, step_bytes)
    return LoadedModel(
        implementation=setup.implementation,
        spec=None,
        context_length=context_length,
        vocab_size=described.vocab_size,
        device=device,
        dtype=setup.dtype,
        quantization="none",
        quantized_activations=None,
        fingerprint=fingerprint,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        pools=pools,
        engine=make_engine(pools),
        load_seconds=setup.seconds,
    )
