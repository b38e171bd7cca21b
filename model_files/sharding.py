"""One model on several tensor-parallel ranks (Megatron-LM, Shoeybi et al., 2019): the part of each rank.

Query heads with their KV heads, the inner rows of the MLP, and the vocabulary of the head are divided. The embedding,
the norms and the residual are on every rank. Two products of a layer lead back to the residual: o_proj and
down_proj. Their columns are divided, so each rank gets a part of a sum. The parts are added up in the order of the
ranks. Biases of these products belong to rank 0.

Each expert is divided like an MLP. Every rank has the router, chooses the same experts, and computes its part of them.
With whole experts on some ranks, the others would be idle for a few tokens.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from .errors import UnsupportedModel
from .spec import AttentionSpec, ExpertsSpec, LayerSpec, MLASpec, MLPSpec, ModelSpec, QKNorm


class Axis(IntEnum):
    """Along which a tensor [rows, columns] is divided."""

    ROWS = 0
    COLUMNS = 1


@dataclass(frozen=True)
class Slice:
    """``[begin, end)`` of a tensor along ``axis``."""

    axis: Axis
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Return the number of rows or columns in the slice."""
        return self.end - self.begin


NOTHING = Slice(Axis.ROWS, 0, 0)
"""A tensor that this rank has no part in."""


@dataclass(frozen=True)
class Shard:
    """Rank ``rank`` of ``size``, with the model that it is to compute. ``vocab``: its rows of the head."""

    rank: int
    size: int
    whole: ModelSpec
    spec: ModelSpec
    vocab: Slice

    def slice_of(self, name: str) -> Slice | None:
        """Return the part of our tensor ``name`` (``tensor_names.py``) that this rank reads.

        None stands for the whole tensor, and ``NOTHING`` for no part of it.
        """
        if name == "lm_head.weight":
            return self.vocab
        parts = name.split(".")
        if parts[0] != "layers" or self.size == 1:
            return None
        layer, path = self.whole.layers[int(parts[1])], parts[2:]
        if path[-2:] in (["o_proj", "bias"], ["down_proj", "bias"]):
            return None if self.rank == 0 else NOTHING
        return self._of_attention(layer.attention, path[0]) or self._of_mlp(layer.mlp, path)

    def kv_heads(self) -> tuple[int, int]:
        """Return ``[begin, end)`` of the model's KV heads that are on this rank.

        If there are fewer heads than ranks, some ranks have the same one.
        """
        return _kv_heads(self.whole.num_kv_heads, self.rank, self.size)

    @property
    def shares_kv_heads(self) -> bool:
        """Whether several ranks have the same KV head."""
        return self.whole.num_kv_heads < self.size

    def _of_attention(self, attention: AttentionSpec | MLASpec, what: str) -> Slice | None:
        if isinstance(attention, MLASpec):
            return self._of_latent(attention, what)
        heads, dim = _share(attention.heads, self.rank, self.size), attention.head_dim
        kv_heads = _kv_heads(attention.kv_heads, self.rank, self.size)
        match what:
            case "q_proj":
                return Slice(Axis.ROWS, heads[0] * dim, heads[1] * dim)
            case "k_proj" | "v_proj":
                return Slice(Axis.ROWS, kv_heads[0] * dim, kv_heads[1] * dim)
            case "o_proj":
                return Slice(Axis.COLUMNS, heads[0] * dim, heads[1] * dim)
            case "sinks":
                return Slice(Axis.ROWS, *heads)
        return None

    def _of_mlp(self, mlp: MLPSpec | ExpertsSpec, path: list[str]) -> Slice | None:
        """Return the part of an MLP's tensor that this rank reads; None for all of it, and for other tensors.

        ``path``: the parts of its dotted name within a layer.
        """
        network = mlp.shared if isinstance(mlp, ExpertsSpec) and path[0] == "shared" else mlp
        if network is None or len(path) < 2:
            return None
        inner = _share(network.inner, self.rank, self.size)
        match path[-2]:
            case "gate_proj" | "up_proj":
                return Slice(Axis.ROWS, *inner)
            case "down_proj":
                return Slice(Axis.COLUMNS, *inner)
        return None

    def _of_latent(self, attention: MLASpec, what: str) -> Slice | None:
        """Return the part of an MLA layer's projection that belongs to this rank's heads; None for all of it.

        ``what``: the projection's name within the layer, such as "q_b_proj".
        Projections to the latents are read whole by every rank, because every rank has the latents.
        """
        size = {
            "q_proj": attention.qk_head_dim,
            "q_b_proj": attention.qk_head_dim,
            "k_b_proj": attention.kv_lora_rank,
            "v_b_proj": attention.v_head_dim,
            "o_proj": attention.v_head_dim,
        }.get(what)
        if size is None:
            return None
        begin, end = _share(attention.heads, self.rank, self.size)
        return Slice(Axis.COLUMNS if what == "o_proj" else Axis.ROWS, begin * size, end * size)


def _own_heads(attention: AttentionSpec | MLASpec, size: int) -> AttentionSpec | MLASpec:
    heads = attention.heads // size
    if isinstance(attention, MLASpec):
        return replace(attention, heads=heads)
    return replace(attention, heads=heads, kv_heads=max(1, attention.kv_heads // size))


def shard(spec: ModelSpec, rank: int, size: int) -> Shard:
    """Return the part of the model that rank ``rank`` of ``size`` computes.

    Raises ``UnsupportedModel`` if heads or inner elements can't be divided among ``size`` ranks.
    """
    for layer in spec.layers:
        _check(layer, size)
    layers = tuple(
        replace(
            layer,
            attention=_own_heads(layer.attention, size),
            mlp=_divided(layer.mlp, size),
        )
        for layer in spec.layers
    )
    # The vocabulary need not divide: the last ranks may have a row less.
    vocab = Slice(Axis.ROWS, spec.vocab_size * rank // size, spec.vocab_size * (rank + 1) // size)
    return Shard(rank, size, spec, replace(spec, layers=layers), vocab)


def _check(layer: LayerSpec, size: int) -> None:
    attention = layer.attention
    if size < 1:
        raise UnsupportedModel(f"--tp-size {size}: at least one rank computes")
    if attention.heads % size:
        raise UnsupportedModel(f"--tp-size {size} does not divide the model's {attention.heads} query heads")
    if attention.kv_heads % size and size % attention.kv_heads:
        raise UnsupportedModel(
            f"--tp-size {size} and the model's {attention.kv_heads} KV heads don't divide each other"
        )
    if isinstance(layer.mlp, ExpertsSpec):
        _check_inner(layer.mlp.inner, "an expert", size)
        _check_inner(0 if layer.mlp.shared is None else layer.mlp.shared.inner, "the shared expert", size)
    else:
        _check_inner(layer.mlp.inner, "the MLP", size)
    if isinstance(attention, AttentionSpec) and attention.qk_norm is QKNorm.ALL and size > 1:
        raise UnsupportedModel(f"--tp-size {size}: this model normalises all of its query heads together")


def _check_inner(inner: int, whose: str, size: int) -> None:
    if inner % size:
        raise UnsupportedModel(f"--tp-size {size} does not divide the {inner} inner elements of {whose}")


def _divided(mlp: MLPSpec | ExpertsSpec, size: int) -> MLPSpec | ExpertsSpec:
    inner = mlp.inner // size
    if isinstance(mlp, MLPSpec):
        return replace(mlp, inner=inner)
    shared = None if mlp.shared is None else replace(mlp.shared, inner=mlp.shared.inner // size)
    return replace(mlp, inner=inner, shared=shared)


def _share(total: int, rank: int, size: int) -> tuple[int, int]:
    return total * rank // size, total * (rank + 1) // size


def _kv_heads(total: int, rank: int, size: int) -> tuple[int, int]:
    if total >= size:
        return _share(total, rank, size)
    head = rank * total // size
    return head, head + 1
