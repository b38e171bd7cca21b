"""What the ranks of a model have of it: together all, each for itself a model, and the sum of their parts the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.sharding import Axis, Shard, shard
from pdserve.model_files.spec import AttentionSpec, LayerSpec, MLASpec, MLPSpec, ModelSpec, NormSpec, QKNorm, RopeSpec

HIDDEN, DIM, INNER, VOCAB = 24, 4, 32, 51


def make_spec(heads: int = 8, kv_heads: int = 4, **changes: object) -> ModelSpec:
    attention = AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=DIM, scale=0.5, o_bias=True, **changes)
    norm = NormSpec(eps=1e-6)
    layer = LayerSpec(attention=attention, mlp=MLPSpec(inner=INNER), before_attention=norm, before_mlp=norm)
    return ModelSpec(
        family="test",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=(layer, layer),
        final_norm=norm,
        ropes=(RopeSpec(rotary_dim=DIM),),
        context_length=64,
        tied_head=False,
    )


def part(shard_: Shard, name: str, whole: np.ndarray) -> np.ndarray:
    found = shard_.slice_of(name)
    if found is None:
        return whole
    return whole[found.begin : found.end] if found.axis is Axis.ROWS else whole[:, found.begin : found.end]


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 1), (4, 2), (4, 4), (2, 4), (1, 8), (8, 2)])
def test_ranks_have_all_of_it_and_heads_find_their_own_kv(kv_heads: int, size: int) -> None:
    spec = make_spec(8, kv_heads)
    shards = [shard(spec, rank, size) for rank in range(size)]
    sizes = {"q_proj": 8 * DIM, "gate_proj": INNER, "up_proj": INNER}
    for name, rows in sizes.items():
        whole = np.arange(rows)[:, None]
        parts = [part(s, f"layers.1.{name}.weight", whole) for s in shards]
        assert np.array_equal(np.concatenate(parts), whole)
    assert np.concatenate([part(s, "lm_head.weight", np.arange(VOCAB)[:, None]) for s in shards]).size == VOCAB
    group = 8 // kv_heads
    for s in shards:
        attention = s.spec.layers[0].attention
        heads = part(s, "layers.0.q_proj.weight", np.repeat(np.arange(8), DIM)[:, None])[::DIM, 0]
        kv = part(s, "layers.0.k_proj.weight", np.repeat(np.arange(kv_heads), DIM)[:, None])[::DIM, 0]
        assert (len(heads), len(kv)) == (attention.heads, attention.kv_heads)
        assert s.kv_heads() == (kv[0], kv[-1] + 1)
        own_group = attention.heads // attention.kv_heads
        assert [kv[i // own_group] for i in range(len(heads))] == [h // group for h in heads]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_sum_of_the_parts_is_the_product(size: int) -> None:
    rng = np.random.default_rng(size)
    spec = make_spec()
    weight, bias, x = rng.normal(size=(HIDDEN, INNER)), rng.normal(size=HIDDEN), rng.normal(size=INNER)
    total = np.zeros(HIDDEN)
    for rank in range(size):
        s = shard(spec, rank, size)
        own = part(s, "layers.0.gate_proj.weight", x[:, None])[:, 0]
        total += part(s, "layers.0.down_proj.weight", weight) @ own
        rows = part(s, "layers.0.down_proj.bias", bias)
        total += rows if len(rows) else 0
    np.testing.assert_allclose(total, weight @ x + bias)


def test_what_every_rank_has() -> None:
    s = shard(make_spec(), 1, 2)
    for name in ("embed_tokens.weight", "norm.weight", "layers.0.before_mlp.weight", "layers.0.q_norm.weight"):
        assert s.slice_of(name) is None
    assert s.slice_of("layers.0.o_proj.bias").size == 0
    assert shard(make_spec(), 0, 2).slice_of("layers.0.o_proj.bias") is None


@pytest.mark.parametrize(
    ("spec", "size", "why"),
    [
        (make_spec(), 3, "8 query heads"),
        (make_spec(6, 3), 2, "3 KV heads"),
        (make_spec(qk_norm=QKNorm.ALL), 2, "all of its query heads together"),
        (make_spec(), 0, "at least one"),
    ],
)
def test_what_can_t_be_divided_is_refused(spec: ModelSpec, size: int, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        shard(spec, 0, size)


def test_an_mlp_that_can_t_be_divided_is_refused() -> None:
    spec = make_spec(24, 24)
    odd = replace(spec, layers=tuple(replace(layer, mlp=MLPSpec(inner=20)) for layer in spec.layers))
    with pytest.raises(UnsupportedModel, match="20 inner elements"):
        shard(odd, 0, 8)


def test_heads_of_latent_attention_are_divided_and_their_row_is_not() -> None:
    latent = MLASpec(
        heads=4,
        q_lora_rank=6,
        kv_lora_rank=8,
        qk_nope_head_dim=3,
        qk_rope_head_dim=2,
        v_head_dim=5,
        scale=1.0,
        norm=NormSpec(eps=1e-6),
        o_bias=True,
    )
    whole = make_spec()
    layers = tuple(replace(layer, attention=latent) for layer in whole.layers)
    spec = replace(whole, layers=layers, ropes=(RopeSpec(rotary_dim=2),))
    shards = [shard(spec, rank, 2) for rank in range(2)]
    for name, rows in {"q_b_proj": 4 * 5, "k_b_proj": 4 * 8, "v_b_proj": 4 * 5}.items():
        weight = np.arange(rows)[:, None]
        parts = [part(s, f"layers.0.{name}.weight", weight) for s in shards]
        assert len(parts[0]) == rows // 2
        assert np.array_equal(np.concatenate(parts), weight)
    columns = np.arange(4 * 5)[None]
    assert np.array_equal(np.concatenate([part(s, "layers.0.o_proj.weight", columns) for s in shards], 1), columns)
    for s in shards:
        assert all(s.slice_of(f"layers.0.{name}.weight") is None for name in ("q_a_proj", "kv_a_proj", "kv_a_norm"))
        assert (s.spec.layers[0].attention.heads, s.kv_heads(), s.shares_kv_heads) == (2, (0, 1), True)
    with pytest.raises(UnsupportedModel, match="--tp-size 3 does not divide the model's 4 query heads"):
        shard(spec, 0, 3)
