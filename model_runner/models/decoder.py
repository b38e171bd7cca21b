"""The torch model: computes whatever a ``ModelSpec`` says, in the order that ``model_files/spec.py`` gives.

Shapes: T tokens, H query heads, K KV heads, D head_dim, N hidden size, V vocabulary, L wanted rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_files.sharding import Slice
from ...model_files.spec import AttentionSpec, ExpertsSpec, MLASpec, ModelSpec, NormSpec, QKNorm
from ...model_files.tensor_names import EMBEDDING, HEAD, NORM
from ..attention.base import AttentionBackend
from ..batch.forward_batch import ForwardBatch
from ..ops.base import DeviceOps, PassRotation
from ..ops.layers.linear import Linear, Linears, weights_of
from ..ops.layers.rms_norm import RMSNorm
from ..ops.layers.rotary import RotaryEmbedding
from ..ops.reference import linear
from ..ops.torch_ops import TorchOps
from .experts import Experts
from .group import RankGroup, alone
from .latent_attention import LatentAttention
from .mlp import MLP

LayerForward = Callable[..., Tensor]
"""The signature of ``Layer.forward``."""


class Attention:
    """Grouped-query attention of one layer."""

    def __init__(
        self, spec: AttentionSpec, layer: int, hidden: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self._layer = layer
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv_proj = Linear(hidden, (q_size, kv_size, kv_size), bias=spec.qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(q_size, (hidden,), bias=spec.o_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None and spec.qk_norm_spec is not None:
            q_size, kv_size = (q_size, kv_size) if spec.qk_norm == QKNorm.ALL else (spec.head_dim, spec.head_dim)
            self.q_norm = RMSNorm(q_size, spec.qk_norm_spec, device=device)
            self.k_norm = RMSNorm(kv_size, spec.qk_norm_spec, device=device)
        self.sinks = torch.empty(spec.heads, dtype=torch.float32, device=device) if spec.sinks else None

    def forward(
        self, x_TN: Tensor, rotation: PassRotation | None, attention: AttentionBackend, ops: DeviceOps
    ) -> Tensor:
        """Write the tokens' KV, and return the layer's attention output [T, N].

        ``rotation`` None: the layer has no positions.
        """
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        qkv = self.qkv_proj.forward(x_TN).view(x_TN.shape[0], -1, self.spec.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD = self._normalise(q_THD, self.q_norm, ops)
            k_TKD = self._normalise(k_TKD, self.k_norm, ops)
        if rotation is not None:
            q_THD, k_TKD = ops.rotate(q_THD, k_TKD, rotation)
        return self.o_proj.forward(attention.forward(self._layer, q_THD, k_TKD, v_TKD, self.spec, self.sinks))

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Return the layer's weight tensors as views for the loader to fill, by the engine's names after ``prefix``."""
        views = weights_of(self.linears(prefix))
        if self.q_norm is not None and self.k_norm is not None:
            views |= {f"{prefix}.q_norm.weight": self.q_norm.weight, f"{prefix}.k_norm.weight": self.k_norm.weight}
        if self.sinks is not None:
            views[f"{prefix}.sinks"] = self.sinks
        return views

    def linears(self, prefix: str) -> Linears:
        """Return the layer's linear operations, each by the names of the projections that are fused in it."""
        qkv = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        return {qkv: self.qkv_proj, (f"{prefix}.o_proj",): self.o_proj}

    def _normalise(self, x_THD: Tensor, norm: RMSNorm, ops: DeviceOps) -> Tensor:
        if self.spec.qk_norm == QKNorm.HEAD:
            return ops.norm(norm, x_THD)
        return ops.norm(norm, x_THD.flatten(1)).view(x_THD.shape)


class Layer:
    """One decoder layer. Its norms are None where the family has none."""

    def __init__(
        self, model: ModelSpec, layer: int, ranks: RankGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        spec, hidden = model.layers[layer], model.hidden_size

        def norm(norm_spec: NormSpec | None) -> RMSNorm | None:
            return None if norm_spec is None else RMSNorm(hidden, norm_spec, device=device)

        self.spec = spec
        self._ranks = ranks
        self.before_attention, self.after_attention = norm(spec.before_attention), norm(spec.after_attention)
        self.before_mlp, self.after_mlp = norm(spec.before_mlp), norm(spec.after_mlp)
        self.attention: Attention | LatentAttention
        if isinstance(spec.attention, MLASpec):
            self.attention = LatentAttention(spec.attention, layer, hidden, dtype=dtype, device=device)
        else:
            self.attention = Attention(spec.attention, layer, hidden, dtype=dtype, device=device)
        self.mlp: MLP | Experts
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp = Experts(spec.mlp, hidden, dtype=dtype, device=device)
        else:
            self.mlp = MLP(spec.mlp, hidden, dtype=dtype, device=device)

    def forward(
        self,
        x_TN: Tensor,
        normed_TN: Tensor,
        rotation: PassRotation | None,
        attention: AttentionBackend,
        ops: DeviceOps,
        following: RMSNorm | None,
    ) -> Tensor:
        """Apply the layer to ``x_TN`` in place, and return ``x_TN`` normalised by ``following`` (None: as it is).

        ``following``: the norm that comes after this layer, mostly the next layer's first one. ``normed_TN``: the input
        normalised by ``before_attention``. The tokens' KV is written to the pool.
        """
        scale = self.spec.residual_scale
        attended = self._ranks.sum(self.attention.forward(normed_TN, rotation, attention, ops))
        normed_TN = ops.add_and_norm(x_TN, attended, scale, self.after_attention, self.before_mlp)
        more = self._ranks.sum(self.mlp.forward(normed_TN, ops))
        return ops.add_and_norm(x_TN, more, scale, self.after_mlp, following)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Return the layer's weight tensors as views for the loader to fill, by the engine's names after ``prefix``."""
        norms = {
            "before_attention": self.before_attention,
            "after_attention": self.after_attention,
            "before_mlp": self.before_mlp,
            "after_mlp": self.after_mlp,
        }
        return {
            **{f"{prefix}.{name}.weight": norm.weight for name, norm in norms.items() if norm is not None},
            **self.attention.weights(prefix),
            **self.mlp.weights(prefix),
        }

    def linears(self, prefix: str) -> Linears:
        """Return the layer's linear operations, each by the names of the projections that are fused in it.

        The names are the engine's and not the checkpoint's, after ``prefix``: ``layers.3.q_proj``. Left out are the
        experts' router, the shared expert's gate, and projections that are multiplied head by head.
        """
        return {**self.attention.linears(prefix), **self.mlp.linears(prefix)}


class Decoder:
    """The model. Its weights are uninitialised until a loader has filled ``weights()``."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        vocab: Slice | None = None,
        ranks: RankGroup = alone,
        ops: DeviceOps | None = None,
    ) -> None:
        """Allocate the model's weights, without values.

        ``vocab``: rows of the LM head that this rank has; None: all. ``ranks``: the ranks that it adds its parts up
        with; ``spec`` is this rank's share of the model. ``ops``: None stands for torch's.
        """
        self.spec = spec
        self.ranks = ranks
        self.ops = ops or TorchOps()
        self.embed_tokens = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.layers = [Layer(spec, i, ranks, dtype=dtype, device=device) for i in range(spec.num_layers)]
        self._forwards = [layer.forward for layer in self.layers]
        self.norm = RMSNorm(spec.hidden_size, spec.final_norm, device=device)
        table = self.embed_tokens if spec.tied_head else torch.empty_like(self.embed_tokens)
        self.lm_head = table if vocab is None else table[vocab.begin : vocab.end]
        self._rotaries = [RotaryEmbedding(r, spec.rotated_dim, dtype=dtype, device=device) for r in spec.ropes]
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Compute a pass, write its KV to the pool, and return the logits at ``batch.logit_indices``, [L, V].

        They are of ``logits_dtype``. ``attention`` must have planned ``batch``.
        """
        x_TN = F.embedding(batch.input_ids, self.embed_tokens)
        if self._embedding_scale != 1.0:
            x_TN.mul_(self._embedding_scale)
        ops = self.ops
        rotations = [ops.rotation(rotary, batch.positions) for rotary in self._rotaries]
        # What goes into each layer; the last one's sum is normalised where it is wanted alone.
        befores = [layer.before_attention for layer in self.layers]
        normed_TN = x_TN if befores[0] is None else ops.norm(befores[0], x_TN)
        followings = [*befores[1:], None]
        for i, (layer, forward, following) in enumerate(zip(self.layers, self._forwards, followings, strict=True)):
            index = layer.spec.attention.rope
            rotation = None if index is None else rotations[index]
            normed_TN = forward(x_TN, normed_TN, rotation, attention, ops, following)
            batch.done.launched(i + 1)
        batch.hidden.read(lambda tokens: ops.norm(self.norm, x_TN.index_select(0, tokens)))
        batch.scored.keep(lambda tokens: self._logits_at(x_TN, tokens))
        return self._logits_at(x_TN, batch.logit_indices)

    def _logits_at(self, x_TN: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits at ``tokens`` ([L] int64), [L, V], after the last layer's states ``x_TN``."""
        x_LN = self.ops.norm(self.norm, x_TN.index_select(0, tokens))
        logits = self.ranks.join(linear(x_LN, self.lm_head, None)).to(self.logits_dtype)
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        if self.spec.logit_softcap is not None:
            logits.div_(self.spec.logit_softcap).tanh_().mul_(self.spec.logit_softcap)
        return logits

    def wrap_layers(self, wrap: Callable[[int, LayerForward], LayerForward]) -> None:
        """Compute layer ``i`` by the function ``wrap(i, Layer.forward)`` from now on, such as one that times it."""
        self._forwards = [wrap(i, layer.forward) for i, layer in enumerate(self.layers)]

    @property
    def logits_dtype(self) -> torch.dtype:
        """Type of the logits that ``forward`` returns: the activations', or float32 if they are scaled or capped."""
        is_product = self.spec.logit_scale == 1.0 and self.spec.logit_softcap is None
        return self.lm_head.dtype if is_product else torch.float32

    @property
    def why_no_graphs(self) -> str | None:
        """Why no graph can capture a pass, because an operation makes the host wait; None if a graph can.

        Call this after loading weights.
        """
        experts = (layer.mlp.networks for layer in self.layers if isinstance(layer.mlp, Experts))
        return next((why for networks in experts if (why := self.ops.waits_for_experts(networks))), None)

    @property
    def idle_bytes(self) -> int:
        """Bytes of weights that a pass of one token does not read: experts that it does not choose, and embeddings."""
        experts = sum(layer.mlp.idle_bytes for layer in self.layers if isinstance(layer.mlp, Experts))
        # Of the table of embeddings it reads a row, unless the head is the same.
        return experts + (0 if self.spec.tied_head else self.embed_tokens.nbytes)

    def linears(self) -> Linears:
        """Return the linear layers that may keep a packed weight, by the names of their weights, in order."""
        return {
            tuple(f"{name}.weight" for name in names): linear
            for i, layer in enumerate(self.layers)
            for names, linear in layer.linears(f"layers.{i}").items()
        }

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weight tensors as views for the loader to fill, by the engine's names.

        A tied head is left out, as it is the table of embeddings.
        """
        views = {EMBEDDING: self.embed_tokens, NORM: self.norm.weight}
        for i, layer in enumerate(self.layers):
            views |= layer.weights(f"layers.{i}")
        if not self.spec.tied_head:
            views[HEAD] = self.lm_head
        return views
