"""A pass over a few tokens that finds out what a model's attention is: layers, their order, shapes and arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....model_files.errors import UnsupportedModel
from ....model_files.spec import AttentionSpec
from .interface import TRIAL, set_attention
from .masks import window_of

WITHOUT_EFFECT = {
    *("dropout", "is_causal", "sliding_window"),
    *("position_ids", "cache_position", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
}
"""Arguments of attention that change nothing here: transformers' eager attention reads the mask in their place, or they
say how a pass is run. Any other one that has a value changes what is computed."""


class AttentionLayer(NamedTuple):
    """An attention layer. ``module``: the module that calls the attention interface. ``spec``: what it asks for."""

    module: nn.Module
    spec: AttentionSpec


class Recorder:
    """Attention of a trial pass: computes it by the mask that it is given, and writes down what it was.

    ``layers``: in the order of the pass, which is that of the KV pool.
    """

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self.layers: list[AttentionLayer] = []
        self._windows: list[tuple[Tensor, int | None]] = []

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        """Record the module and what its attention is, and compute that under ``mask`` by torch's own attention.

        Raises ``UnsupportedModel`` for attention that can't be served, or if a layer attends twice.
        """
        if any(layer.module is module for layer in self.layers):
            raise UnsupportedModel("a layer attends twice in a pass")
        spec = _describe(q, k, v, arguments, self._window_of(mask))
        self.layers.append(AttentionLayer(module, spec))
        groups = spec.heads // spec.kv_heads
        k, v = k.repeat_interleave(groups, 1).to(q.dtype), v.repeat_interleave(groups, 1).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale).transpose(1, 2)

    def _window_of(self, mask: Tensor | None) -> int | None:
        """Return the window of ``mask`` in tokens (None: all), which is remembered.

        Layers share a mask or two, and reading a mask takes long with a long context.
        """
        for known, window in self._windows:
            if known is mask:
                return window
        window = window_of(mask, self._context_length)
        if mask is not None:
            self._windows.append((mask, window))
        return window


def find_attention(model: Any, tokens: Tensor, context_length: int) -> list[AttentionLayer]:
    """Return the attention layers of a transformers ``model``, in order, found by a pass over ``tokens`` [T].

    Raises ``UnsupportedModel`` if they can't be served.
    """
    recorder = Recorder(context_length)
    set_attention(model.modules(), recorder)
    model.set_attn_implementation(TRIAL)
    with torch.inference_mode():
        model(input_ids=tokens[None], use_cache=False)
    set_attention(model.modules(), None)
    layers, expected = recorder.layers, model.config.num_hidden_layers
    if len(layers) != expected:
        raise UnsupportedModel(f"{len(layers)} of its {expected} layers attend by transformers' attention interface")
    shapes = {(layer.spec.kv_heads, layer.spec.head_dim) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedModel("layers whose keys and values have different shapes are not supported")
    return layers


def _describe(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], window: int | None) -> AttentionSpec:
    heads, tokens, head_dim = q.shape[1:]
    if v.shape != k.shape or k.shape[-1] != head_dim:
        sizes = ", ".join(str(list(x.shape[1:])) for x in (q, k, v))
        raise UnsupportedModel(f"queries, keys and values of different sizes ({sizes}) are not supported")
    if q.shape[0] != 1 or k.shape[2] != tokens or heads % k.shape[1]:
        raise UnsupportedModel(f"attention of {list(q.shape)} over {list(k.shape)} is not supported")
    scale, softcap = arguments.get("scaling"), arguments.get("softcap")
    for name, value in (("scaling", scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, float | int):
            raise UnsupportedModel(f"an attention argument {name!r} that is no number is not supported")
    for name, value in arguments.items():
        if name not in WITHOUT_EFFECT | {"scaling", "softcap"} and value is not None and value is not False:
            raise UnsupportedModel(f"the attention argument {name!r} is not supported")
    return AttentionSpec(
        heads=heads,
        kv_heads=k.shape[1],
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        rope=None,
        window=window,
        softcap=None if softcap is None else float(softcap),
    )
