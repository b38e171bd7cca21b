"""What the CPU engine is told of a model, and what it refuses, by name."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields, replace

import pytest
import torch

from pdserve.model_files.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QKNorm,
    RopeSpec,
)
from pdserve.model_runner.cpu_engine import lowering
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import check_size, load_library
from pdserve.model_runner.cpu_engine.lowering import ACTIVATIONS, COMPUTED, QK_NORMS, lower, refusal

NORM = NormSpec(eps=1e-5)
ATTENTION = AttentionSpec(heads=6, kv_heads=2, head_dim=32, scale=0.25)
LAYER = LayerSpec(attention=ATTENTION, mlp=MLPSpec(inner=70), before_attention=NORM, before_mlp=NORM)


def make_spec(*layers: LayerSpec, **changes) -> ModelSpec:
    spec = ModelSpec(
        family="test",
        vocab_size=60,
        hidden_size=90,
        layers=layers,
        final_norm=NORM,
        ropes=(RopeSpec(rotary_dim=32),) * 2,
        context_length=100,
        tied_head=True,
    )
    return replace(spec, **changes)


def reason(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype = torch.float32) -> str | None:
    return refusal(spec, dtype, kv_dtype)


def test_a_plain_model() -> None:
    spec = make_spec(LAYER, LAYER, LAYER)
    assert reason(spec) is None
    model, layers = lower(spec, torch.float32)
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.vocab) == (
        3,
        90,
        6,
        2,
        32,
        60,
    )
    assert (model.embedding_scale, model.logit_scale, model.logit_softcap) == (1.0, 1.0, 0.0)
    layer = layers[2]
    assert layer.qkv.before.used
    assert layer.qkv.before.eps == pytest.approx(1e-5)
    assert (layer.qkv.qk_norm, layer.qkv.rope) == (0, 0)
    assert (layer.attend.scale, layer.attend.softcap, layer.attend.window) == (0.25, 0.0, 0)
    assert not layer.o.after.used
    assert not layer.down.after.used
    assert (layer.o.scale, layer.down.scale) == (1.0, 1.0)
    assert (layer.gate_up.inner, layer.gate_up.activation) == (70, 0)


def test_a_layer_of_everything() -> None:
    attention = replace(
        ATTENTION, rope=1, window=9, softcap=30.0, qk_norm=QKNorm.ALL, qk_norm_spec=NormSpec(eps=1e-2, offset=1.0)
    )
    other = LayerSpec(
        attention=attention,
        mlp=MLPSpec(inner=8, activation=Activation.GELU_TANH),
        before_attention=None,
        before_mlp=None,
        after_attention=NormSpec(eps=1e-3),
        after_mlp=NormSpec(eps=1e-4),
        residual_scale=0.5,
    )
    blind = replace(LAYER, attention=replace(ATTENTION, rope=None, window=10**12))
    spec = make_spec(LAYER, other, blind, embedding_scale=24.03, logit_scale=0.125, logit_softcap=20.0)
    assert reason(spec) is None
    model, layers = lower(spec, torch.bfloat16)
    # As it was rounded in training.
    assert model.embedding_scale == 24.0
    assert (model.logit_scale, model.logit_softcap) == (0.125, 20.0)
    layer = layers[1]
    assert not layer.qkv.before.used
    assert not layer.gate_up.before.used
    assert (layer.qkv.qk_norm, layer.qkv.rope) == (2, 1)
    assert layer.qkv.qk_eps == pytest.approx(1e-2)
    assert (layer.attend.softcap, layer.attend.window) == (30.0, 9)
    assert (layer.o.after.used, layer.down.after.used) == (1, 1)
    assert (layer.o.after.eps, layer.down.after.eps) == (pytest.approx(1e-3), pytest.approx(1e-4))
    assert (layer.o.scale, layer.down.scale) == (0.5, 0.5)
    assert (layer.gate_up.inner, layer.gate_up.activation) == (8, 2)
    assert layers[2].qkv.rope == -1
    assert layers[2].attend.window == 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Experts(MLPSpec):
    """A kind of network that the engine has never heard of."""

    count: int = 8


@dataclass(frozen=True, kw_only=True)
class Odd(AttentionSpec):
    """Likewise."""


REFUSED = {
    "they compute in bfloat16 and float32, not in float16 over": (make_spec(LAYER), torch.float16),
    "a head_dim that is a multiple of 16, not 40": (
        make_spec(replace(LAYER, attention=replace(ATTENTION, head_dim=40))),
        torch.float32,
    ),
    "even hidden and intermediate": (make_spec(LAYER, replace(LAYER, mlp=MLPSpec(inner=7))), torch.float32),
    "layers[1].attention.heads: 4 beside 6": (
        make_spec(LAYER, replace(LAYER, attention=replace(ATTENTION, heads=4))),
        torch.float32,
    ),
    "layers[1].attention.qk_norm_spec: None": (
        make_spec(LAYER, replace(LAYER, attention=replace(ATTENTION, qk_norm=QKNorm.HEAD))),
        torch.float32,
    ),
    "layers[0].attention.rope: 2 of 2": (
        make_spec(replace(LAYER, attention=replace(ATTENTION, rope=2))),
        torch.float32,
    ),
    "layers[1].mlp: Experts": (make_spec(LAYER, replace(LAYER, mlp=Experts(inner=70))), torch.float32),
    "layers[0].attention: Odd": (
        make_spec(replace(LAYER, attention=Odd(heads=6, kv_heads=2, head_dim=32, scale=0.25))),
        torch.float32,
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_it_lacks_is_named(says: str) -> None:
    spec, dtype = REFUSED[says]
    why = reason(spec, dtype)
    assert why is not None
    assert says in why


def test_a_field_that_is_new_to_it_is_refused_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    known = tuple(name for name in COMPUTED[AttentionSpec] if name != "softcap")
    monkeypatch.setitem(COMPUTED, AttentionSpec, known)
    assert reason(make_spec(LAYER)) is None
    capped = replace(LAYER, attention=replace(ATTENTION, softcap=3.0))
    assert reason(make_spec(LAYER, capped)) == "they do not compute layers[1].attention.softcap: 3.0"


def test_what_it_computes_is_in_the_spec() -> None:
    """A field that was renamed would be let pass under its old name."""
    for kind, names in COMPUTED.items():
        assert set(names) <= {one.name for one in fields(kind)}
    assert set(ACTIVATIONS) == set(Activation)
    assert set(QK_NORMS) == {None, *QKNorm}


def test_structs_of_another_size_are_refused() -> None:
    try:
        library = load_library()
    except BuildError as error:
        pytest.skip(str(error))
    check_size(library, "LayerOps", ctypes.sizeof(lowering.LayerOps))
    with pytest.raises(BuildError, match="LayerOps has 128 bytes in the CPU kernels, and 73"):
        check_size(library, "LayerOps", 73)
    with pytest.raises(BuildError, match="Nothing has 0 bytes"):
        check_size(library, "Nothing", 8)
