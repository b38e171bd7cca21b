"""Loads a model, and chooses the engine that computes it.

In this order: description → device and types → weights → KV pools → engine. The attention backend "cpu" stands for the
C++ engine, which has weights of its own and does without torch. A model that transformers' own class computes
(``--model-impl``) is described by a pass of itself, after its weights are loaded.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...model_files.context_length import choose_context_length, with_context, without_idle_windows
from ...model_files.errors import OTHER_WEIGHTS, InvalidWeights, UnsupportedModel
from ...model_files.model_impl import ModelImpl, choose_model_impl
from ...model_files.model_path import commit_of, resolve_model
from ...model_files.spec import ModelSpec
from ...model_files.spec_reader import read_spec
from ..cpu_engine.packed_model import PackedModel
from ..device.base import Device
from ..device.choice import choose_device, choose_dtype, choose_kv_dtype, open_device
from ..dtypes import QUANTIZED
from ..grammar.matchers import Matchers
from ..kv.size import layers_apart
from ..options import WorkerOptions
from ..ranks.part import ModelPart, WholeModel
from ..torch_import import note_torch
from .attention_choice import choose_attention_backend
from .load_setup import Loaded, Native, Setup, Threads, describe_for_ranks
from .loaded import LoadedModel

if TYPE_CHECKING:
    from ..kv.sparse.channels import LabelChannels
    from ..ranks.host_ranks import HostRanks
    from ..weights_cache.cache import WeightsSource
    from ..weights_cache.request import PackRequest

log = logging.getLogger(__name__)

LEAST_ROOM = 4096
"""Tokens that ranks can compute at once, whatever the options: what start-up measures with is as long."""


def load_model(
    options: WorkerOptions,
    threads: Threads | None = None,
    ranks: HostRanks | None = None,
    weights_source: WeightsSource | None = None,
) -> LoadedModel:
    """Load the model, or the part of it that a rank computes, with its KV pools and its engine.

    ``threads``: where to compute; None: no thread is bound. ``ranks``: the tensor-parallel rank that this is; None: the
    only one. ``weights_source``: where the C++ engine gets its weights from; None: they are packed here. Raises
    ``ModelError`` if the model can't be served as asked.
    """
    begin = time.monotonic()
    source = resolve_model(options.model_path, revision=options.revision, weights=options.load_format == "auto")
    if (commit := commit_of(source)) is not None:
        log.info("%s is that of commit %s", options.model_path, commit)
    implementation = choose_model_impl(options.model_impl, source)
    place = choose_device(options.device, options.base_gpu_id + (0 if ranks is None else ranks.place.local))
    device = open_device(place, strict=options.fail_on_host_sync)
    dtype = choose_dtype(options.dtype, device.kind)
    kv_dtype = choose_kv_dtype(options.kv_cache_dtype, dtype)
    setup = Setup(options, source, implementation, device, dtype, kv_dtype, threads or Threads())
    setup.seconds["config"] = time.monotonic() - begin
    if implementation is ModelImpl.TRANSFORMERS:
        note_torch("transformers' own class")
        from .load_torch import load_transformers

        return load_transformers(setup)
    return _load_native(setup, ranks, weights_source)


def _load_native(setup: Setup, ranks: HostRanks | None, weights_source: WeightsSource | None) -> LoadedModel:
    options, device, timed = setup.options, setup.device, setup.timed
    with timed("config"):
        described = read_spec(setup.source)
        context_length = choose_context_length(described, options.context_length)
        # What tells instances apart; a window that no sequence outgrows is no difference to this one alone.
        identity = with_context(described, context_length)
        spec = without_idle_windows(identity)
        _warn_of_long_factors(described, context_length)
        _refuse_kv_dtype(spec, setup)
        labels = _choose_labels(options, spec)
    part = _choose_part(spec, ranks, device, options)
    native = Native(spec, identity, context_length, part, labels)
    if options.load_format == "script":
        backend = "script"
    else:
        with timed("kernels"), setup.threads.compiling():
            own = spec if part.shard is None else part.shard.spec
            kinds = (setup.dtype, setup.kv_dtype)
            backend = choose_attention_backend(options.attention_backend, own, device.place, *kinds)
    log.info("model implementation: native, family %s", spec.family)
    if backend == "script":
        from .scripted import load_scripted

        loaded = load_scripted(setup, native)
    elif backend == "cpu":
        loaded = _load_for_kernels(setup, native, weights_source)
    else:
        note_torch(f"attention backend {backend}")
        from .load_torch import load_for_torch

        loaded = load_for_torch(setup, native, backend)
    return LoadedModel(
        implementation=setup.implementation,
        spec=spec,
        context_length=context_length,
        vocab_size=spec.vocab_size,
        device=device,
        dtype=setup.dtype,
        quantization=loaded.quantization,
        quantized_activations=loaded.activations,
        fingerprint=loaded.fingerprint,
        weight_bytes=loaded.weight_bytes,
        step_bytes=loaded.step_bytes,
        pools=loaded.pools,
        engine=loaded.engine,
        matchers=Matchers(setup.options, spec.vocab_size),
        load_seconds=setup.seconds,
    )


def _choose_labels(options: WorkerOptions, spec: ModelSpec) -> LabelChannels | None:
    if not options.enable_double_sparsity:
        return None
    # Imported here: labels are torch's.
    from ..kv.sparse.channels import choose_channels

    return choose_channels(options, spec)


def _choose_part(spec: ModelSpec, ranks: HostRanks | None, device: Device, options: WorkerOptions) -> ModelPart:
    """Return the part of ``spec`` that this process computes: all of it if ``ranks`` is None, else this rank's.

    Raises ``UnsupportedModel``.
    """
    if ranks is None:
        return WholeModel(spec, device.place, options, layers_apart(options, spec))
    from ..ranks.on_devices import refuse_on_devices
    from ..ranks.rank_parts import PartInSharedPool, PartOnDevice

    if device.beside:
        refuse_on_devices(options, ranks.place)
        return PartOnDevice(spec, ranks, device)
    return PartInSharedPool(spec, ranks)


def _pack_here(threads: Threads) -> WeightsSource:
    # Imported here: a worker packs in another process.
    from ..weights_cache.cache import PrivateWeights
    from ..weights_cache.local_builder import LocalBuilder

    return PrivateWeights(LocalBuilder(threads.team_size))


def _load_for_kernels(setup: Setup, native: Native, weights_source: WeightsSource | None) -> Loaded:
    # Imported here: they load the compiled kernels.
    from ..cpu_engine.build import choose_level
    from ..cpu_engine.native_engine import Ranks
    from ..cpu_engine.ranks import ExchangeRoom
    from ..cpu_engine.team import Team
    from ..weights_cache.request import PackRequest
    from .cpu import CpuEngine

    options, threads, shard = setup.options, setup.threads, native.part.shard
    source = weights_source or _pack_here(threads)
    with setup.timed("weights"):
        dtypes = (setup.dtype, setup.kv_dtype)
        request = PackRequest(options, setup.source, native.spec, native.identity, shard, *dtypes, threads.node)
        packed = source.open(request)
    contents = packed.contents
    with setup.timed("kv_pool"):
        maker = native.make_pool_maker(setup, "blocks", packed.memory.page_cache)
        # For the longest pass that there can be.
        uncut = native.context_length if options.chunked_prefill_size == -1 else 0
        prompts = max(options.max_prefill_tokens, uncut, LEAST_ROOM)
        room = ExchangeRoom(prompts + options.max_running_requests, native.spec.hidden_size, native.spec.vocab_size)
        identity = describe_for_ranks(setup, contents.fingerprint, maker, "cpu", choose_level().name)
        pools, exchange = maker.make(packed.memory.total, identity=identity, room=room)
    with setup.timed("kernels"):
        team = Team(threads.team_size, threads.cpus, threads.spin_us, adapts=threads.adapts)
        engine = CpuEngine(
            packed,
            request.own_spec,
            setup.dtype,
            pools,
            team,
            Ranks(shard, exchange),
            partial(_PackedWeights(source, request).reopen, contents.fingerprint),
            clears_begun_pages=options.hands_over,
        )
    found = (contents.quantization, contents.activations, contents.fingerprint)
    return Loaded(pools, engine, *found, packed.memory.total)


class _PackedWeights(NamedTuple):
    """The packed weights of one model, mapped once, and again after they were dropped."""

    source: WeightsSource
    request: PackRequest

    def reopen(self, expected: str) -> PackedModel:
        """Map the weights again, after they were dropped.

        Raises ``InvalidWeights`` if their fingerprint is not ``expected``.
        """
        packed = self.source.open(self.request)
        if packed.contents.fingerprint != expected:
            raise InvalidWeights(OTHER_WEIGHTS)
        return packed


def _warn_of_long_factors(described: ModelSpec, context_length: int) -> None:
    original = min((rope.original_context for rope in described.ropes if rope.long_factors), default=context_length)
    if context_length > original:
        log.warning(
            "longrope: short texts are computed with the factors for texts of more than %d tokens, too, because "
            "sequences may have %d; --context-length %d computes short texts as transformers does",
            *(original, context_length, original),
        )


def _refuse_kv_dtype(spec: ModelSpec, setup: Setup) -> None:
    if spec.latent_dim is not None and setup.kv_dtype in QUANTIZED:
        raise UnsupportedModel(
            f"--kv-cache-dtype {setup.options.kv_cache_dtype} is not supported for latent attention (MLA); "
            "leave it out, or choose bfloat16"
        )
