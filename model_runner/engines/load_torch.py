"""Loads the models of torch engines: pdserve's own layers, and those of transformers' classes."""

from __future__ import annotations

from functools import partial

import torch

from ...model_files.context_length import choose_context_length
from ...model_files.foreign_config import read_foreign
from ..grammar.matchers import Matchers
from ..kv.layout import make_layout
from ..kv.pools import Pools
from ..loader.load import foreign_fingerprint
from ..loader.weight_loader import WeightLoader
from ..models.transformers.refusals import refuse_for_transformers
from ..ranks.part import WholeModel
from .load_setup import Loaded, Native, Setup, describe_for_ranks
from .loaded import LoadedModel
from .pool_maker import PoolMaker
from .step_trial import measure_step_bytes
from .torch import TorchEngine, WrapLayer


def load_for_torch(setup: Setup, native: Native, backend: str) -> Loaded:
    """Load a model of pdserve's own layers for a ``TorchEngine``: its weights, KV pools and engine.

    ``backend``: name of the attention backend.
    """
    options, device, part = setup.options, setup.device, native.part
    setup.threads.start_torch()
    with setup.timed("weights"):
        dtype: torch.dtype = getattr(torch, setup.dtype)
        loader = WeightLoader(
            *(options, setup.source, native.spec, native.identity, dtype, device.torch, part.shard),
            find_group=partial(part.group, device.torch),
        )
        weights = loader.load()
    maker, wrap_layer = native.make_pool_maker(setup, "tokens"), _name_layers(setup)

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
            wrap_layer=wrap_layer,
        )

    with setup.timed("kv_pool"):
        step_bytes = measure_step_bytes(maker, make_engine)
        identity = describe_for_ranks(setup, weights.fingerprint, maker, backend, "")
        pools, _ = maker.make(weights.nbytes, step_bytes, identity)
    with setup.timed("kernels"):
        engine = make_engine(pools)
    found = (weights.quantization, None, weights.fingerprint)
    return Loaded(pools, engine, *found, weights.nbytes, step_bytes)


def load_transformers(setup: Setup) -> LoadedModel:
    """Load a model that transformers' own class computes (``--model-impl``), with its KV pools and its engine.

    Raises ``ModelError`` if the class can't be served.
    """
    options, source, device, timed = setup.options, setup.source, setup.device, setup.timed
    setup.threads.start_torch()
    with timed("config"):
        described = read_foreign(source)
        context_length = choose_context_length(described, options.context_length)
        refuse_for_transformers(options)
    with timed("imports"):
        # Imported here: it takes seconds, and native models need none of it.
        from ..models.transformers.loading import LoadRequest, load_transformers_model
        from .transformers import TransformersEngine
    with timed("weights"):
        dtype: torch.dtype = getattr(torch, setup.dtype)
        folder, seed = source.path, options.random_seed
        loading = LoadRequest(folder, described, context_length, dtype, device.torch, options.load_format, seed)
        loaded = load_transformers_model(loading)
        fingerprint = foreign_fingerprint(loaded.config, loaded.weights)
        weight_bytes = sum(tensor.nbytes for tensor in loaded.weights.values())

    def make_engine(pools: Pools) -> TransformersEngine:
        return TransformersEngine(loaded.model, weight_bytes, pools, device, dtype, options)

    with timed("kv_pool"):
        layout = make_layout(loaded.shape, options.page_size, setup.kv_dtype)
        part = WholeModel(loaded.shape, device.place, options)
        maker = PoolMaker(options, device, described.vocab_size, context_length, part, layout)
        step_bytes = measure_step_bytes(maker, make_engine)
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
        matchers=Matchers(setup.options, described.vocab_size),
        load_seconds=setup.seconds,
    )


def _name_layers(setup: Setup) -> WrapLayer | None:
    """Return what wraps each layer in a profiler range of its name, or None without ``--enable-nvtx``."""
    if not setup.options.enable_nvtx:
        return None
    from ..steps.step_ranges import name_layers

    return name_layers(setup.device.torch)
