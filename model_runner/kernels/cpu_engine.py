"""A model on the CPU kernels: packed weights, and a whole forward pass in one call.

Made from a loaded model, whose own weights may be dropped afterwards, but for the embedding table.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from ctypes import c_int64
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from ...model_files.spec import Activation, ModelSpec, NormSpec, QKNorm
from ...runtime.progress import ProgressLog
from ..forward_batch import ForwardBatch
from ..kv_pool import MHATokenToKVPool
from ..layers.linear import Linear
from ..layers.rms_norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..loader.quantized_blocks import HEAD_NAMES, BlockSource
from ..models.decoder import Decoder
from .attention import pool_view
from .library import NATIVE_DTYPES, EngineConfig, ForwardArgs, WeightPart, load_library
from .team import Team

log = logging.getLogger(__name__)

DENSE = 0
"""``Format::kDense`` of linear.h."""
ROTATIONS = 1024
"""Positions that the table of rotations grows by."""


class LinearKind(IntEnum):
    """``LinearKind`` of engine.h."""

    QKV = 0
    O = 1  # noqa: E741 - the layer's name
    GATE_UP = 2
    DOWN = 3
    HEAD = 4


class NormKind(IntEnum):
    """``NormKind`` of engine.h."""

    ATTENTION = 0
    MLP = 1
    Q = 2
    K = 3
    FINAL = 4


def refusal(spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the kernels can't run this model; None if they can."""
    if dtype not in NATIVE_DTYPES or kv_dtype not in NATIVE_DTYPES:
        return f"they compute in bfloat16 and float32, not in {dtype} over a KV pool of {kv_dtype}"
    if spec.head_dim % 16:
        return f"they need a head_dim that is a multiple of 16, not {spec.head_dim}"
    if spec.hidden_size % 2 or spec.layers[0].mlp.inner % 2:
        return "they need even hidden and intermediate sizes"
    lacking = _lacking(spec)
    return f"they lack {', '.join(lacking)}" if lacking else None


def _lacking(spec: ModelSpec) -> list[str]:
    """What ``spec`` has that the kernels don't."""
    layer = spec.layers[0]
    attention, mlp = layer.attention, layer.mlp
    norms: list[NormSpec | None] = [layer.before_attention, layer.before_mlp, spec.final_norm]
    if attention.qk_norm is not None:
        norms.append(attention.qk_norm_spec)
    features = {
        "layers that differ": any(other != layer for other in spec.layers),
        "layers without norms before them": layer.before_attention is None or layer.before_mlp is None,
        "post norms": layer.after_attention is not None or layer.after_mlp is not None,
        "norms of different eps": len({norm.eps for norm in norms if norm is not None}) > 1,
        f"the activation {mlp.activation}": mlp.activation != Activation.SILU,
        "windows": attention.window is not None,
        "soft caps of attention": attention.softcap is not None,
        f"an attention scale of {attention.scale}": attention.scale != attention.head_dim**-0.5,
        "norms of all heads of q and k together": attention.qk_norm == QKNorm.ALL,
        "layers without positions": attention.rope is None,
        "several ropes": len(spec.ropes) != 1,
        "a residual scale": layer.residual_scale != 1.0,
        "an embedding scale": spec.embedding_scale != 1.0,
        "a logit scale": spec.logit_scale != 1.0,
        "soft caps of logits": spec.logit_softcap is not None,
    }
    return [name for name, is_there in features.items() if is_there]


class CpuEngine:
    """Computes passes over ``pool``. Raises ``BuildError`` where the kernels can't be had.

    Linear layers take their weights from ``blocks`` where it has them, and from the model elsewhere.
    """

    def __init__(self, model: Decoder, pool: MHATokenToKVPool, team: Team, blocks: BlockSource | None = None) -> None:
        self._blocks = blocks
        self.weight_bytes = 0
        """What the linear layers' weights take, as a decode step reads them."""
        self._library = load_library()
        self._spec = spec = model.spec
        # All layers are alike, or refusal() would have said so.
        attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
        self.pool, self.team = pool, team
        self._embedding = model.embed_tokens
        self._rotary = RotaryEmbedding(spec.ropes[0], spec.head_dim, dtype=torch.float32, device=torch.device("cpu"))
        self._cos = self._sin = torch.empty(0, spec.head_dim // 2)
        self.rotations: tuple[int, int, int] = (0, 0, 0)
        """Addresses of the cosines and sines, and how many positions they reach."""
        native = EngineConfig(
            spec.num_layers,
            spec.hidden_size,
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            mlp.inner,
            spec.vocab_size,
            spec.final_norm.eps,
            attention.qk_norm is not None,
            pool_view(pool),
        )
        handle = self._library.pds_engine_new(native, NATIVE_DTYPES[self._embedding.dtype], team.handle)
        if handle is None:
            raise MemoryError("no memory for the engine's activations")
        self.handle = handle
        self.close = weakref.finalize(self, self._library.pds_engine_free, handle)
        self._pack(model)
        # The blocks are packed; the source may hold a whole file.
        self._blocks = None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of ``batch.logit_indices``, [L, V] float32; writes the pass's KV to the pool.

        Raises ``IndexError`` for a token that is not in the vocabulary.
        """
        ids, positions = batch.input_ids.numpy(), batch.positions.numpy()
        if not 0 <= ids.min() <= ids.max() < self._spec.vocab_size:
            raise IndexError(f"token ids reach from {ids.min()} to {ids.max()}")
        self.reserve_rotations(int(positions.max()) + 1)
        entries = np.empty((len(batch.q_lens), 4), dtype=np.int32)
        entries[:, 0] = batch.rows.numpy()
        entries[:, 1] = batch.starts
        entries[:, 2] = batch.q_lens
        entries[:, 3] = np.cumsum(entries[:, 2]) - entries[:, 2]
        wanted = batch.logit_indices.shape[0]
        logits = torch.empty(wanted, self._spec.vocab_size)
        args = ForwardArgs(
            len(ids),
            len(entries),
            wanted,
            batch.input_ids.data_ptr(),
            batch.positions.data_ptr(),
            batch.out_cache_loc.data_ptr(),
            batch.logit_indices.data_ptr(),
            entries.ctypes.data,
            batch.req_to_token.data_ptr(),
            batch.req_to_token.stride(0),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            logits.data_ptr(),
            None if batch.done is None else batch.done.address,
        )
        if self._library.pds_engine_forward(self.handle, args) != 0:
            raise MemoryError(f"no memory for a pass of {len(ids)} tokens")
        return logits

    def weight_bytes_read(self) -> dict[LinearKind, int]:
        """Bytes of weights that all threads together read in the last pass."""
        counted = (c_int64 * len(LinearKind))()
        self._library.pds_engine_weight_bytes(self.handle, counted)
        return {kind: counted[kind] for kind in LinearKind}

    def reserve_rotations(self, positions: int) -> None:
        """Extend the table of rotations to ``positions``."""
        have = self._cos.shape[0]
        if positions <= have:
            return
        more = torch.arange(have, -(-positions // ROTATIONS) * ROTATIONS)
        rotation = self._rotary.forward(more)
        half = self._spec.head_dim // 2
        # The second halves: those of the sines are not negated.
        self._cos = torch.cat((self._cos, rotation.cos[:, 0, half:]))
        self._sin = torch.cat((self._sin, rotation.sin[:, 0, half:]))
        self.rotations = (self._cos.data_ptr(), self._sin.data_ptr(), len(self._cos))

    def _pack(self, model: Decoder) -> None:
        # The head counts as a layer.
        progress = ProgressLog(log, "packing the weights", len(model.layers) + 1)
        for i, layer in enumerate(model.layers):
            attention, mlp = layer.attention, layer.mlp
            self._set_linear(LinearKind.QKV, i, attention.qkv_proj, "q_proj", "k_proj", "v_proj")
            self._set_linear(LinearKind.O, i, attention.o_proj, "o_proj")
            self._set_linear(LinearKind.GATE_UP, i, mlp.gate_up_proj, "gate_proj", "up_proj")
            self._set_linear(LinearKind.DOWN, i, mlp.down_proj, "down_proj")
            self._set_norm(NormKind.ATTENTION, i, layer.before_attention)
            self._set_norm(NormKind.MLP, i, layer.before_mlp)
            self._set_norm(NormKind.Q, i, attention.q_norm)
            self._set_norm(NormKind.K, i, attention.k_norm)
            progress.advance(1)
        self._set_norm(NormKind.FINAL, 0, model.norm)
        self._set_weight(LinearKind.HEAD, 0, model.lm_head, None, HEAD_NAMES[:1])
        self._library.pds_engine_set_embedding(self.handle, self._embedding.data_ptr())

    def _set_linear(self, kind: LinearKind, layer: int, linear: Linear, *parts: str) -> None:
        names = [f"layers.{layer}.{part}.weight" for part in parts]
        self._set_weight(kind, layer, linear.weight, linear.bias, names)

    def _set_weight(
        self, kind: LinearKind, layer: int, weight: Tensor, bias: Tensor | None, names: Sequence[str]
    ) -> None:
        rows, floats = weight.contiguous(), None if bias is None else bias.float().contiguous()
        found = None if self._blocks is None else self._blocks.find(names, weight)
        if found is None:
            parts = [WeightPart(rows.data_ptr(), rows.shape[0], DENSE)]
        else:
            parts = [WeightPart(part.blocks.ctypes.data, len(part.blocks), int(part.format)) for part in found]
        wide = int(weight.dtype == torch.bfloat16)
        for part in parts:
            self.weight_bytes += self._library.pds_packed_bytes(wide, part.format, part.rows, rows.shape[1])
        bias_pointer, array = None if floats is None else floats.data_ptr(), (WeightPart * len(parts))(*parts)
        answer = self._library.pds_engine_set_linear(self.handle, kind, layer, len(parts), array, bias_pointer)
        if answer < 0:
            raise MemoryError("no memory for the packed weights")
        if answer > 0:
            raise ValueError(f"{', '.join(names)} can't be multiplied with together")

    def _set_norm(self, kind: NormKind, layer: int, norm: RMSNorm | None) -> None:
        if norm is None:
            return
        floats = norm.scale.contiguous()
        if self._library.pds_engine_set_norm(self.handle, kind, layer, floats.data_ptr()) != 0:
            raise MemoryError("no memory for the packed weights")
