"""A model of transformers that computes passes of this server: its attention reads and writes the paged KV pool.

A pass's tokens go in as one sequence, with the position of each in its request. All that a model does with a token,
but for attention, must depend on that token and its position alone; ``self_check.py`` sees whether it does.

Shapes: T tokens, H query heads, K KV heads, D head_dim, V vocabulary, L wanted rows of logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....model_files.spec import AttentionSpec
from ...attention.base import AttentionBackend
from ...batch.forward_batch import ForwardBatch
from .interface import PAGED, set_attention
from .trial import AttentionLayer

WANTED = "logits_to_keep"
"""The argument of transformers' models that names the rows of logits that are wanted."""


class PagedPass:
    """The pass that is being computed: its batch, and the attention backend that has planned it."""

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._attention: AttentionBackend | None = None
        self._layers = 0

    def begin(self, batch: ForwardBatch, attention: AttentionBackend) -> None:
        """Begin a pass over ``batch``, which ``attention`` has planned; ``attend`` follows for each layer."""
        self._batch, self._attention, self._layers = batch, attention, 0

    def end(self, layers: int) -> None:
        """End the pass, so that ``attend`` raises until the next ``begin``.

        Raises ``RuntimeError`` unless all ``layers`` have attended: the pool would lack the others' KV.
        """
        if self._layers != layers:
            raise RuntimeError(f"{self._layers} layers attended in a pass, of {layers}")
        self._batch = self._attention = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Write ``k`` and ``v`` [T, K, D] of layer ``layer`` to the pool, and return the attention of ``q`` [T, H, D].

        The result is [T, H * D].  Raises ``RuntimeError`` if ``layer`` is not the next one, or outside of a pass.
        """
        if self._batch is None or self._attention is None or layer != self._layers:
            raise RuntimeError(f"layer {layer} attended out of its turn")
        out = self._attention.forward(layer, q, k, v, spec)
        self._layers += 1
        self._batch.done.launched(self._layers)
        return out


class LayerAttention:
    """Attention of layer ``layer``, by ``paged``."""

    def __init__(self, layer: int, spec: AttentionSpec, paged: PagedPass) -> None:
        self._layer = layer
        self._spec = spec
        self._paged = paged

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        """Write the KV to the pool, and return the attention over it, [1, T, H, D], as the layer's ``spec`` says.

        ``mask`` and ``arguments`` are ignored: the trial pass has derived ``spec`` from those that it was given.
        """
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q, k, v))
        out = self._paged.attend(self._layer, q_THD.to(v.dtype), k_TKD, v_TKD, self._spec)
        return out.view(1, *q_THD.shape).to(q.dtype)


class Bare(NamedTuple):
    """A pass without attention. ``logits``: [T, V] float32. ``attended``: each layer's queries, keys and values."""

    logits: Tensor
    attended: list[Tensor]


class NoAttention:
    """Gives zeros, and keeps what it was given; see ``Bare``."""

    def __init__(self) -> None:
        self.attended: list[Tensor] = []

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        """Record queries, keys and values as one float32 tensor [T, H D + 2 K D], and return zeros as the attention."""
        self.attended.append(torch.cat([x[0].transpose(0, 1).flatten(1) for x in (q, k, v)], 1).float())
        return torch.zeros_like(q).transpose(1, 2)


class LastStates:
    """Keeps the hidden states that ``base``, a causal LM's model below its head, returns: those after the last norm."""

    def __init__(self, base: nn.Module) -> None:
        self._states: Tensor | None = None
        base.register_forward_hook(self._keep)

    def take(self) -> Tensor:
        """Return the states of the pass that has ended, [T, N], and keep them no longer."""
        states, self._states = self._states, None
        assert states is not None, "a pass computes the model below the head"
        return states

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._states = output[0][0]


class TransformersModel:
    """Model that computes passes by ``model``, a causal LM of transformers. ``layers``: its attention layers."""

    def __init__(self, model: Any, layers: Sequence[AttentionLayer]) -> None:
        self._model = model
        self.modules = [layer.module for layer in layers]
        self._paged = PagedPass()
        self._keeps_rows = WANTED in inspect.signature(model.forward).parameters
        self._attentions = [LayerAttention(i, layer.spec, self._paged) for i, layer in enumerate(layers)]
        self._last_states = LastStates(model.base_model)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Compute a pass, write its KV to the pool, and return the logits at ``batch.logit_indices``, [L, V] float32.

        ``attention`` must have planned ``batch``.
        """
        return self.forward_at(batch.positions, batch, attention)

    def forward_at(self, positions: Tensor, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Compute a pass as ``forward`` does, but tell the model other ``positions`` [T], for all but attention."""
        self._paged.begin(batch, attention)
        wanted = {WANTED: batch.logit_indices} if self._keeps_rows else {}
        out = self._model(input_ids=batch.input_ids[None], position_ids=positions[None], use_cache=False, **wanted)
        self._paged.end(len(self.modules))
        states_TN = self._last_states.take()
        batch.hidden.read(lambda tokens: states_TN.index_select(0, tokens))
        logits: Tensor = out.logits[0]
        if not self._keeps_rows:
            logits = logits.index_select(0, batch.logit_indices)
        return logits.float()

    def use_pool(self) -> None:
        """Compute attention over the KV pool from now on, until ``eager`` or ``without_attention`` is called."""
        for module, attention in zip(self.modules, self._attentions, strict=True):
            set_attention([module], attention)
        self._model.set_attn_implementation(PAGED)

    def eager(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits [T, V] float32 of ``tokens`` [T], with transformers' own attention.

        ``positions``: [T]; None: transformers' default. Call ``use_pool`` before the next pass.
        """
        self._model.set_attn_implementation("eager")
        return self._logits(tokens, positions)

    def without_attention(self, tokens: Tensor, positions: Tensor) -> Bare:
        """Compute ``tokens`` [T] at ``positions`` [T] with an attention that gives zeros, for checks.

        Call ``use_pool`` before the next pass.
        """
        none = NoAttention()
        set_attention(self.modules, none)
        self._model.set_attn_implementation(PAGED)
        return Bare(self._logits(tokens, positions), none.attended)

    def _logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        more = {} if positions is None else {"position_ids": positions[None]}
        logits: Tensor = self._model(input_ids=tokens[None], use_cache=False, **more).logits
        return logits[0].float()
