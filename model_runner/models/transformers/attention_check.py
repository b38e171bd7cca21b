"""Each attention module of a model by itself: ours must be what the module computes, whatever type the model has.

A whole model in a type of 16 bits rounds so much that a small difference does not show. A copy of one module in float32
does not, given what it is given in a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....model_files.errors import UnsupportedModel
from ...attention.registry import BackendNeeds, make_attention_backend
from ...batch.forward_batch import ForwardBatch
from ...kv.layout import KVShape, make_layout
from ...kv.pool import MHATokenToKVPool
from .interface import PAGED, set_attention
from .model import LayerAttention, PagedPass
from .trial import AttentionLayer

PAGE = 4
TOLERANCE = 1e-3
"""Tolerated root mean square of the difference, as a share of that of the output."""


class Call(NamedTuple):
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def check_modules(model: Any, layers: Sequence[AttentionLayer], tokens: Tensor) -> None:
    """Raise ``UnsupportedModel`` unless attention on the KV pool computes what each layer's module does by itself.

    The modules are compared as float32 copies, on their inputs in a pass over ``tokens`` [T].
    """
    calls = _record_calls(model, layers, tokens)
    for i, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        module: Any = copy.deepcopy(layer.module).float()
        args, kwargs = _as_float(call.args), _as_float(call.kwargs)
        module.config._attn_implementation = "eager"
        expected = _output(module(*args, **kwargs))
        module.config._attn_implementation = PAGED
        set_attention([module], _paged(layer, tokens))
        got = _output(module(*args, **kwargs))
        error = float((got - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt().clamp_min(1e-30))
        if not error <= TOLERANCE:
            raise UnsupportedModel(
                f"attention of layer {i} is not what its arguments say: off by {error:.2g} of itself"
            )


def _record_calls(model: Any, layers: Sequence[AttentionLayer], tokens: Tensor) -> list[Call]:
    calls: dict[nn.Module, Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = Call(args, kwargs)

    hooks = [layer.module.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    model.set_attn_implementation("eager")
    model(input_ids=tokens[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [calls[layer.module] for layer in layers]


def _as_float(value: Any) -> Any:
    """Return ``value`` with all floating-point tensors in float32, also within tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_as_float(item) for item in value)
    if isinstance(value, dict):
        return {key: _as_float(item) for key, item in value.items()}
    return value


def _output(result: Any) -> Tensor:
    """Return the output of an attention module in float32: its result, or the first element of a tuple."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output.float()


def _paged(layer: AttentionLayer, tokens: Tensor) -> LayerAttention:
    """Return attention on a small KV pool of its own, in float32, for one ``layer`` and a pass over ``tokens``."""
    length, device = len(tokens), tokens.device
    pages = -(-length // PAGE) + 1
    shape = KVShape(1, layer.spec.kv_heads, layer.spec.head_dim)
    pool = MHATokenToKVPool(make_layout(shape, PAGE, torch.float32), pages, device)
    positions = torch.arange(length, device=device)
    batch = ForwardBatch(
        input_ids=tokens,
        positions=positions,
        out_cache_loc=positions + PAGE,
        rows=torch.zeros(1, dtype=torch.int64, device=device),
        starts=[0],
        q_lens=[length],
        req_to_token=(positions + PAGE).to(torch.int32)[None],
        logit_indices=positions,
    )
    attention = make_attention_backend("torch", BackendNeeds([pool], torch.float32))
    attention.plan(batch)
    paged = PagedPass()
    paged.begin(batch, attention)
    return LayerAttention(0, layer.spec, paged)
