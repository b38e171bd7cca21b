"""The one order in which engines rotate: rotating there and here is the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.model_files.rope_order import head_order, row_order
from pdserve.model_files.spec import (
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    Pairing,
    QKNorm,
    RopeSpec,
)

NORM = NormSpec(eps=1e-6)


def turn(pairs: list[tuple[int, int]], head: np.ndarray, angles: np.ndarray) -> np.ndarray:
    out = head.copy()
    for (i, j), angle in zip(pairs, angles, strict=True):
        out[i] = head[i] * np.cos(angle) - head[j] * np.sin(angle)
        out[j] = head[j] * np.cos(angle) + head[i] * np.sin(angle)
    return out


@given(st.integers(1, 12), st.integers(0, 12), st.sampled_from(Pairing))
def test_rotating_after_ordering_is_ordering_after_rotating(half: int, rest: int, pairing: Pairing) -> None:
    size, rotary = 2 * (half + rest), 2 * half
    order = head_order(RopeSpec(rotary_dim=rotary, pairing=pairing), size)
    assert sorted(order) == list(range(size))
    rng = np.random.default_rng(0)
    head, angles = rng.normal(size=size), rng.normal(size=half)
    neighbours = pairing == Pairing.NEIGHBOURS
    theirs = [(2 * i, 2 * i + 1) if neighbours else (i, i + half) for i in range(half)]
    ours = [(i, i + size // 2) for i in range(size // 2)]
    turned = turn(ours, head[order], np.concatenate((angles, np.zeros(rest))))
    np.testing.assert_allclose(turned, turn(theirs, head, angles)[order])


def make_spec(rope: RopeSpec, layer_rope: int | None, qk_norm: QKNorm) -> ModelSpec:
    attention = AttentionSpec(
        heads=3, kv_heads=1, head_dim=4, scale=0.5, rope=layer_rope, qk_norm=qk_norm, qk_norm_spec=NORM
    )
    layer = LayerSpec(attention=attention, mlp=MLPSpec(inner=8), before_attention=NORM, before_mlp=NORM)
    return ModelSpec(
        family="x",
        vocab_size=8,
        hidden_size=12,
        layers=(layer,),
        final_norm=NORM,
        ropes=(rope,),
        context_length=8,
        tied_head=True,
    )


@pytest.mark.parametrize("layer_rope", [0, None])
def test_rows_of_q_and_k_and_their_norms(layer_rope: int | None) -> None:
    spec = make_spec(RopeSpec(rotary_dim=4, pairing=Pairing.NEIGHBOURS), layer_rope, QKNorm.ALL)
    head = [0, 2, 1, 3]
    rows = [*head, *(4 + i for i in head), *(8 + i for i in head)]
    for name, expected in (
        ("q_proj.weight", rows),
        ("q_proj.bias", rows),
        ("q_norm.weight", rows),
        ("k_proj.bias", head),
    ):
        assert list(row_order(spec, f"layers.0.{name}")) == expected
    for name in ("v_proj.weight", "o_proj.weight", "before_attention.weight"):
        assert row_order(spec, f"layers.0.{name}") is None
    assert row_order(spec, "embed_tokens.weight") is None
    one = make_spec(RopeSpec(rotary_dim=2), layer_rope, QKNorm.HEAD)
    assert list(row_order(one, "layers.0.q_norm.weight")) == [0, 2, 1, 3]
    assert row_order(make_spec(RopeSpec(rotary_dim=4), 0, QKNorm.HEAD), "layers.0.q_proj.weight") is None
