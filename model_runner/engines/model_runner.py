"""One model on one device: description, weights, KV pool and attention backend, ready to run forward passes.

Built once, in this order: description → device and types → weights → attention backend → KV pool → engine. Then
``forward`` any number of times, from one thread; only the pool changes. The attention backend "cpu" stands for a whole
engine, which runs passes in the model's place, with weights of its own. A model that transformers' own class computes
(``--model-impl``) is described by a pass of itself, once it has its weights.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from ...mem_cache.kv_pages.region import KVRegion, allocate_region
from ...messages.worker import KVOrder
from ...model_files.context_length import choose_context_length, with_context, without_idle_windows
from ...model_files.errors import InvalidWeights, UnsupportedModel
from ...model_files.foreign_config import read_foreign
from ...model_files.model_impl import ModelImpl, choose_model_impl
from ...model_files.model_path import ModelSource, commit_of, resolve_model
from ...model_files.sharding import Shard
from ...model_files.spec import AttentionSpec, MLASpec, ModelSpec
from ...model_files.spec_reader import read_spec
from ...runtime.options import ServerOptions
from ...runtime.transfer_backends import BACKENDS
from ..attention.base import AttentionBackend, attention_limits
from ..attention.registry import BackendNeeds, make_attention_backend
from ..batch.forward_batch import ForwardBatch
from ..batch.step_plan import begun_tokens
from ..device.choice import choose_device, choose_dtype, choose_kv_dtype, open_device
from ..device.placement import SPIN_US
from ..kv.pool import HasKV, KVPool, make_layout, make_pool
from ..kv.quantization import LARGEST
from ..kv.size import GIB, choose_pools, layers_apart
from ..kv.sparse.channels import LabelChannels, choose_channels
from ..loader.load import fingerprint, foreign_fingerprint, load_model_weights
from ..loader.open_blocks import open_blocks
from ..loader.open_packed import Quantization, choose_quantization, open_packed
from ..loader.quantized_blocks import BlockSource, QuantizedActivations, has_whole_blocks
from ..models.decoder import Decoder, LayerForward
from ..models.group import alone
from ..models.transformers.refusals import refuse_for_transformers
from ..ops.choose import choose_ops
from ..steps.decode_graphs import graph_sizes, why_no_graphs
from ..steps.step_memory import GRAPH_BYTES, StepSizes, bytes_of_steps
from ..steps.step_runner import StepRunner
from .attention_choice import choose_attention_backend

if TYPE_CHECKING:
    from ..cpu_engine.native_model import CpuEngine
    from ..cpu_engine.ranks import ExchangeRoom, NativeRanks
    from ..cpu_engine.team import Team
    from ..ranks.host_ranks import HostRanks
    from ..sampling.native import NativeSampler

log = logging.getLogger(__name__)

LEAST_ROOM = 4096
"""Tokens that ranks can compute at once, whatever the options: what start-up measures with is as long."""


class TorchModel(Protocol):
    """A model that runs on an attention backend."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Logits of ``batch.logit_indices``, [L, V]; ``attention`` has planned ``batch``."""


class ModelRunner:
    """Computes logits. Raises ``ModelError`` from its constructor where the model can't be served as asked.

    Attributes: ``implementation``, ``spec`` (None where transformers' own class computes), ``context_length`` and
    ``vocab_size`` (tokens), ``device``, ``dtype`` (weights and activations), ``quantization`` (what "auto" came to),
    ``quantized_activations`` (None: they stay as they are),
    ``layout``, ``max_total_tokens`` (slots to hand out at first, page 0 excluded; ``limit_tokens``: what they may
    become), ``num_slots`` (all that are reserved), ``page_size``,
    ``pool``, ``kv_region`` (its memory as one buffer; None on an accelerator), ``window_pool`` (of layers whose pages
    go back behind a window, None where there are none) and its ``window_region``, ``max_window_tokens`` and
    ``num_window_pages`` (of that, without and with page 0; else 0), ``fingerprint``, ``attention_backend`` (its name),
    ``engine`` and ``sampler`` (what computes passes and chooses tokens, where the CPU kernels run),
    ``hardware`` (the device, as the step loop uses it), ``graph_sizes`` (of decode steps to capture; none: nothing is),
    ``logits_dtype`` (of what ``compute`` returns),
    ``step_bytes`` (of an accelerator, what steps take beside weights and pool; 0: not measured),
    ``weight_bytes`` (in memory; ``step_weight_bytes``: what a decode step reads of them), ``clears_begun_pages``,
    ``load_seconds``. Of a rank, the description, ``layout`` and ``fingerprint`` are of the whole model on its host, the
    weights its own.
    """

    def __init__(
        self,
        options: ServerOptions,
        spin_us: int = SPIN_US,
        cpus: tuple[int, ...] | None = None,
        ranks: HostRanks | None = None,
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``spin_us``, ``cpus``: see ``Placement``; with ``cpus`` the calling thread is bound to the first already.
        ``compiling``: within it, compilers are started that are not to inherit the thread's cores.

        ``ranks``: the tensor-parallel rank that this is, None for the only one.
        """
        self._spin_us = spin_us
        self._cpus = cpus
        self._ranks = ranks
        self._compiling = compiling
        self.load_seconds: dict[str, float] = {}
        with self._timed("config"):
            has_weights = options.load_format != "dummy"
            source = resolve_model(options.model_path, revision=options.revision, weights=has_weights)
            if (commit := commit_of(source)) is not None:
                log.info("%s is that of commit %s", options.model_path, commit)
            self.implementation = choose_model_impl(options.model_impl, source)
            self.device = choose_device(
                options.device, options.base_gpu_id + (0 if ranks is None else ranks.place.local)
            )
            self.hardware = open_device(self.device, strict=options.fail_on_host_sync)
            self.dtype = choose_dtype(options.dtype, self.device)
        kv_dtype = choose_kv_dtype(options.kv_cache_dtype, self.dtype)
        self.spec: ModelSpec | None = None
        self.quantization: Quantization = "none"
        self.quantized_activations: QuantizedActivations | None = None
        self.fingerprint = ""
        self.weight_bytes = 0
        self._team: Team | None = None
        self.sampler: NativeSampler | None = None
        self.engine: CpuEngine | None = None
        self.graph_sizes: tuple[int, ...] = ()
        self.logits_dtype = torch.float32
        self.step_bytes = 0
        self._attention: AttentionBackend | None = None
        self._clears = False
        self._named_layers: Callable[[int, LayerForward], LayerForward] | None = None
        if options.enable_nvtx:
            from ..steps.step_ranges import name_layers

            self._named_layers = name_layers(self.device)
        self._compute: Callable[[ForwardBatch], Tensor]
        self._again: Callable[[], None] | None = None
        """Loads the weights as they were loaded first."""
        self._meet: Callable[[], None] | None = None
        # The engine reads nothing beyond a row's end, but the peer that gets a page may run on the torch backend.
        self.clears_begun_pages = options.hands_over
        if self.implementation is ModelImpl.TRANSFORMERS:
            self._start_transformers(options, source, kv_dtype)
        else:
            self._start_native(options, source, kv_dtype)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of ``batch.logit_indices``, [L, V] float32; writes the pass's KV to the pool."""
        with torch.inference_mode():
            self.prepare(batch)
            return self.compute(batch).float()

    def prepare(self, batch: ForwardBatch) -> None:
        """The half of ``forward`` that depends on more than the batch's tensors: once before each ``compute``."""
        if self._clears:
            self._clear_begun_pages(batch)
        if self._attention is not None:
            self._attention.plan(batch)

    def compute(self, batch: ForwardBatch) -> Tensor:
        """The other half, which can be captured where ``graph_sizes`` has any; logits of ``logits_dtype``."""
        return self._compute(batch)

    def _start_native(self, options: ServerOptions, source: ModelSource, kv_dtype: torch.dtype) -> None:
        with self._timed("config"):
            described = read_spec(source)
            self.context_length = choose_context_length(described, options.context_length)
            # What tells instances apart; a window that no sequence outgrows is no difference to this one alone.
            identity = with_context(described, self.context_length)
            spec = self.spec = without_idle_windows(identity)
            self.vocab_size = spec.vocab_size
            if spec.latent_dim is not None and kv_dtype in LARGEST:
                raise UnsupportedModel(
                    f"--kv-cache-dtype {options.kv_cache_dtype} is not supported for latent attention (MLA); "
                    "leave it out, or choose bfloat16"
                )
            labels = choose_channels(options, spec)
        shard = self._shard(options, spec)
        with self._timed("kernels"), self._compiling():
            self.attention_backend = choose_attention_backend(
                options.attention_backend, spec if shard is None else shard.spec, self.device, self.dtype, kv_dtype
            )
        log.info("model implementation: native, family %s", spec.family)

        def load() -> tuple[Decoder, BlockSource | None]:
            blocks = self._open_blocks(options, source, spec, shard)
            return self._load(options, source, spec, identity, blocks, shard), blocks

        with self._timed("weights"):
            model, blocks = load()
        with self._timed("kv_pool"):
            windows = layers_apart(options, spec) if self._ranks is None else {}
            self._make_layout(options, self._kept(spec), kv_dtype, windows, labels)
            self._measure_steps(options, lambda: self._use_torch(options, model, shard), labels)
            self._allocate_pool(options, shard, labels)
        self.step_weight_bytes = self.weight_bytes - model.idle_bytes
        with self._timed("kernels"):
            if self.attention_backend == "cpu":
                self._use_kernels(model, blocks, shard)
            else:
                self._use_torch(options, model, shard)
        self._again = lambda: self._use_again(*load(), shard)

    def drop_weights(self) -> None:
        """Give the weights back, with what computes with them; what knows ``engine`` has to let go of it, too.

        Raises ``UnsupportedModel``.
        """
        if self._again is None:
            raise UnsupportedModel("a model by transformers' own class (--model-impl) keeps its weights")
        self.engine = None
        self._meet, self._compute = None, _without_weights

    def take_weights(self) -> None:
        """Load the weights again, as at the start, into a new ``engine`` where there was one. Raises ``ModelError``
        where that can't be done, or where the files hold other weights now.
        """
        assert self._again is not None
        before = self.fingerprint
        try:
            self._again()
            if self.fingerprint != before:
                raise InvalidWeights("the files hold other weights than at the start; restart to serve those")
        except BaseException:
            self.fingerprint = before
            self.drop_weights()
            raise

    def _use_again(self, model: Decoder, blocks: BlockSource | None, shard: Shard | None) -> None:
        if self.attention_backend == "cpu":
            self._use_kernels(model, blocks, shard)
        else:
            self._compute_by(model, shard)

    def _shard(self, options: ServerOptions, spec: ModelSpec) -> Shard | None:
        if self._ranks is None:
            return None
        if self._is_apart:
            from ..ranks.on_devices import refuse_on_devices

            refuse_on_devices(options, self._ranks.place)
        return self._ranks.shard(spec)

    @property
    def _is_apart(self) -> bool:
        """Whether this is one of several ranks, each of which has a device, and a KV pool on it, of its own."""
        return self._ranks is not None and self.hardware.beside

    def _kept(self, spec: ModelSpec) -> HasKV:
        """What the pool keeps of a model."""
        if self._ranks is None:
            return spec
        return self._ranks.kept_apart(spec) if self._is_apart else self._ranks.kept(spec)

    def _start_transformers(self, options: ServerOptions, source: ModelSource, kv_dtype: torch.dtype) -> None:
        with self._timed("config"):
            described = read_foreign(source)
            self.context_length = choose_context_length(described, options.context_length)
            self.vocab_size = described.vocab_size
            refuse_for_transformers(options)
            self.attention_backend = "torch"
        with self._timed("imports"):
            # Imported here: it takes seconds, and native models need none of it.
            from ..models.transformers.loading import Loading, load_transformers_model
        with self._timed("weights"):
            loaded = load_transformers_model(
                Loading(
                    source.path,
                    described,
                    self.context_length,
                    self.dtype,
                    self.device,
                    options.load_format,
                    options.random_seed,
                )
            )
            self.fingerprint = foreign_fingerprint(loaded.config, loaded.weights)
            self.weight_bytes = sum(tensor.nbytes for tensor in loaded.weights.values())
            self.step_weight_bytes = self.weight_bytes
        with self._timed("kv_pool"):
            self._make_layout(options, loaded.shape, kv_dtype)
            self._measure_steps(options, lambda: self._use_torch(options, loaded.model))
            self._allocate_pool(options)
        self._use_torch(options, loaded.model)

    def _load(
        self,
        options: ServerOptions,
        source: ModelSource,
        spec: ModelSpec,
        identity: ModelSpec,
        blocks: BlockSource | None,
        shard: Shard | None,
    ) -> Decoder:
        if shard is None or self._ranks is None:
            model = Decoder(spec, self.dtype, self.device, ops=choose_ops(self.device))
        else:
            group = (
                alone
                if self.attention_backend == "cpu"
                else self._ranks.join().torch_ranks(spec.vocab_size, self.device)
            )
            model = Decoder(shard.spec, self.dtype, self.device, shard.vocab, group, choose_ops(self.device))
        packed = None
        if self.quantization in ("packed", "w8a8"):
            seed = options.random_seed if options.load_format == "dummy" else None
            packed = open_packed(self.quantization, model, source, spec, self.dtype, seed, shard)
        weights = model.weights()
        samples = load_model_weights(
            weights, source, spec, options.load_format, options.random_seed, blocks, shard, packed
        )
        rounding: str = self.quantization if packed is None else packed.rounding
        if self.quantization in ("int8", "int4") and shard is not None and not has_whole_blocks(shard.spec):
            # Those layers stay as they are: another model than where they are rounded.
            log.warning("--tp-size %d: rows that are no whole blocks on a rank are not rounded", shard.size)
            rounding = f"{rounding} on {shard.size} ranks"
        self.fingerprint = fingerprint(identity, samples, rounding, blocks)
        self.weight_bytes = sum(view.nbytes for view in weights.values())
        if packed is not None:
            self.weight_bytes += packed.nbytes - sum(weights[name].nbytes for name in packed.left_out)
        if blocks is not None:
            self.weight_bytes += blocks.nbytes - sum(weights[name].nbytes for name in blocks.left_out)
        return model

    def _open_blocks(
        self, options: ServerOptions, source: ModelSource, spec: ModelSpec, shard: Shard | None
    ) -> BlockSource | None:
        is_torch = self.attention_backend != "cpu"
        self.quantization = choose_quantization(
            options, source, self.device, self.dtype, is_torch=is_torch, is_alone=self._ranks is None
        )
        if self.quantization == "none" or self.quantization == "packed" or self.quantization == "w8a8":
            return None
        if self.attention_backend != "cpu":
            raise UnsupportedModel(
                f"--quantization {options.quantization} needs the CPU kernels, which can't be used here"
            )
        self.quantized_activations = options.quantized_activations
        return open_blocks(self.quantization, source, spec, self.dtype, shard, self.quantized_activations)

    def _use_torch(self, options: ServerOptions, model: TorchModel, shard: Shard | None = None) -> None:
        attentions, limits = list[AttentionSpec | MLASpec](), None
        if isinstance(model, Decoder):
            self.logits_dtype = model.logits_dtype
            attentions = [layer.attention for layer in model.spec.layers]
            limits = attention_limits(model.spec, options.max_running_requests, self.context_length)
        sizes = graph_sizes(options.max_running_requests, options.graph_sizes, options.cuda_graph_max_bs)
        pages = -(-self.context_length // self.page_size) * max(sizes, default=0)
        needs = BackendNeeds(
            self.pool,
            self.dtype,
            self.window_pool,
            limits,
            self.hardware,
            attentions,
            pages,
            options.flashinfer_workspace_size,
            options,
        )
        attention = self._attention = make_attention_backend(self.attention_backend, needs)
        self._clears = self.clears_begun_pages or attention.reads_whole_pages
        self._compute_by(model, shard)
        why_not = why_no_graphs(options, self.hardware, model, attention.is_graph_safe)
        if why_not is None:
            self.graph_sizes = sizes
        elif self.hardware.can_capture:
            log.info("decode steps run without CUDA graphs: %s", why_not)

    def _compute_by(self, model: TorchModel, shard: Shard | None) -> None:
        attention = self._attention
        assert attention is not None
        if shard is not None and shard.shares_kv_heads and not self._is_apart and isinstance(model, Decoder):
            self._meet = model.ranks.meet
        if self._named_layers is not None and isinstance(model, Decoder):
            model.wrap_layers(self._named_layers)
        self._compute = lambda batch: model.forward(batch, attention)

    def _use_kernels(self, model: Decoder, blocks: BlockSource | None, shard: Shard | None) -> None:
        # Imported here: it loads the compiled kernels.
        from ..cpu_engine.native_engine import Ranks
        from ..cpu_engine.native_model import CpuEngine
        from ..cpu_engine.team import Team
        from ..sampling.native import NativeSampler

        ranks = None if shard is None or self._exchange is None else Ranks(shard, self._exchange)
        if self._team is None:
            self._team = Team(torch.get_num_threads(), self._cpus, self._spin_us)
            self.sampler = NativeSampler(self._team)
        engine = self.engine = CpuEngine(model, self.pool, self._team, blocks, ranks, self.window_pool)
        self.step_weight_bytes = engine.weight_bytes
        if engine.shares_heads:
            self._meet = engine.meet
        self._clears, self._compute = self.clears_begun_pages, engine.forward

    def _make_layout(
        self,
        options: ServerOptions,
        kept: HasKV,
        dtype: torch.dtype,
        windows: Mapping[int, int] | None = None,
        labels: LabelChannels | None = None,
    ) -> None:
        order: KVOrder = "blocks" if self.attention_backend == "cpu" else "tokens"
        self.page_size = options.page_size
        self.layout = make_layout(kept, options.page_size, dtype, order, windows, labels)

    def _measure_steps(
        self, options: ServerOptions, use_torch: Callable[[], None], labels: LabelChannels | None = None
    ) -> None:
        """Find ``step_bytes`` by steps over pools of page 0 alone. A pool whose size is given needs none."""
        if not self.hardware.beside or options.max_total_tokens is not None:
            return
        graphs: list[int] = []

        def make() -> tuple[StepRunner, StepSizes]:
            use_torch()
            graphs.extend(self.graph_sizes)
            # Graphs share their memory, and the largest takes most.
            self.graph_sizes = self.graph_sizes[-1:]
            gathers = self._attention is None or not self._attention.is_graph_safe
            size = StepSizes.of(options, self.device.type, self.context_length, gathers=gathers)
            return StepRunner(self, options.max_running_requests), size

        self.pool = make_pool(self.layout, 1, self.device, labels=labels)
        has_windows = self.layout.window_group is not None
        self.window_pool: KVPool | None = None
        if has_windows:
            self.window_pool = make_pool(self.layout, 1, self.device, group=1)
        self.num_slots, self.num_window_pages = self.page_size, int(has_windows)
        try:
            self.step_bytes = bytes_of_steps(self.hardware, make) + len(graphs[1:]) * GRAPH_BYTES
        finally:
            self._attention, self.window_pool, self._compute = None, None, _without_weights
            del self.pool
            gc.collect()
        log.info("steps take up to %.2f GiB beside weights and KV pool", self.step_bytes / GIB)

    def _allocate_pool(
        self, options: ServerOptions, shard: Shard | None = None, labels: LabelChannels | None = None
    ) -> None:
        layout = self.layout
        self.kv_region: KVRegion | None = None
        self.window_pool = None
        self.window_region: KVRegion | None = None
        self.num_window_pages = self.max_total_tokens = 0
        self._exchange: NativeRanks | None = None
        heads = None
        is_shared = BACKENDS[options.disaggregation_transfer_backend].needs_shared_memory
        if self._ranks is not None and self._is_apart:
            pages = self._choose_pages(options, self.weight_bytes)
            num_pages = self._ranks.agree(pages, f"{self._identity(options)} {self.hardware.name}")
        elif shard is not None and self._ranks is not None:
            heads = self._ranks.own_heads(shard.whole)
            from ..ranks.host_ranks import Own

            own = Own(
                self.weight_bytes,
                layout.page_bytes,
                lambda weight_bytes: self._choose_pages(options, weight_bytes),
                self._room(options),
                self._identity(options),
            )
            num_pages, self.kv_region, self._exchange = self._ranks.share(own)
        else:
            num_pages = self._choose_pages(options, self.weight_bytes)
            kept_bytes = num_pages * layout.groups[0].page_bytes
            if self.device.type == "cpu" and kept_bytes:
                self.kv_region = allocate_region(kept_bytes, shared=is_shared)
        buffer = None if self.kv_region is None else self.kv_region.buffer
        self.pool = make_pool(layout, num_pages, self.device, buffer, heads, labels=labels)
        if self.num_window_pages:
            # Committed as it is touched, which a tensor of zeros would not be.
            window_bytes = self.num_window_pages * layout.groups[1].page_bytes
            if self.device.type == "cpu":
                self.window_region = allocate_region(window_bytes, shared=is_shared)
            buffer = None if self.window_region is None else self.window_region.buffer
            self.window_pool = make_pool(layout, self.num_window_pages, self.device, buffer, group=1)
        self.max_window_tokens = max(0, self.num_window_pages - 1) * options.page_size
        self.limit_tokens, self.num_slots = (num_pages - 1) * options.page_size, num_pages * options.page_size
        self.max_total_tokens = min(self.max_total_tokens or self.limit_tokens, self.limit_tokens)

    @property
    def pools(self) -> list[KVPool]:
        """All of them."""
        return [self.pool] if self.window_pool is None else [self.pool, self.window_pool]

    def _choose_pages(self, options: ServerOptions, weight_bytes: int) -> int:
        """To reserve, with page 0, beside weights that are loaded; ``max_total_tokens``: what is handed out of them."""
        memory, kind = self.hardware.memory(), self.device.type
        self.max_total_tokens, reserved = choose_pools(
            options, self.layout, self.context_length, weight_bytes, memory, kind, self.step_bytes
        )
        self.num_window_pages = reserved.windowed // options.page_size + 1 if reserved.windowed else 0
        return reserved.kept // options.page_size + 1

    def _room(self, options: ServerOptions) -> ExchangeRoom | None:
        """For the longest pass there can be."""
        if self.attention_backend != "cpu" or self.spec is None:
            return None
        from ..cpu_engine.ranks import ExchangeRoom

        uncut = self.context_length if options.chunked_prefill_size == -1 else 0
        prompts = max(options.max_prefill_tokens, uncut, LEAST_ROOM)
        return ExchangeRoom(prompts + options.max_running_requests, self.spec.hidden_size, self.vocab_size)

    def _identity(self, options: ServerOptions) -> str:
        """What ranks on several hosts must have in common."""
        level = ""
        if self.attention_backend == "cpu":
            from ..cpu_engine.build import choose_level

            level = choose_level().name
        kept = [group.dtype for group in self.layout.groups]
        served = (self.fingerprint, self.attention_backend, level, self.dtype, kept, self.context_length)
        sizes = (options.page_size, options.max_running_requests, options.max_prefill_tokens)
        return repr((*served, *sizes, options.chunked_prefill_size))

    def _clear_begun_pages(self, batch: ForwardBatch) -> None:
        """Zero the pages that this pass begins and does not fill.

        Attention reads whole pages and masks the lanes beyond a row's end; a NaN that a former owner left there would
        get through the mask, as 0 × NaN is NaN.
        """
        size, begun_at = self.layout.page_size, batch.begun_at
        if begun_at is None:
            begun_at = torch.from_numpy(begun_tokens(np.array(batch.starts), np.array(batch.q_lens), size))
            begun_at = begun_at.to(self.device)
        if not len(begun_at):
            return
        pages = batch.out_cache_loc[begun_at] // size
        self.pool.clear(pages)
        if self.window_pool is not None and batch.window_pages is not None:
            self.window_pool.clear(batch.window_pages[pages].to(torch.int64))
        if self._meet is not None:
            # Who is late must not clear what another rank has written.
            self._meet()

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.load_seconds[what] = self.load_seconds.get(what, 0.0) + time.monotonic() - begin


def _without_weights(_batch: ForwardBatch) -> Tensor:
    raise RuntimeError("a pass was asked for while the weights are not there")
