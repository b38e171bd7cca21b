"""The order of a head's elements in which every engine rotates: pair ``i`` lies at ``i`` and ``head_dim / 2 + i``.

Checkpoints pair other elements, or rotate only a part of each head. The elements of q and k can have any order that is
the same for both, because their product is the same sum. So loaders bring rows into this order. Elements that are not
rotated fill the rest, as pairs that turn by an angle of 0. Values keep their order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .spec import MLASpec, ModelSpec, Pairing, QKNorm, RopeSpec

Order = npt.NDArray[np.int64]


def head_order(rope: RopeSpec, head_dim: int) -> Order:
    """Return [head_dim]: for each element of a head in pdserve's order, its index in the checkpoint's order."""
    half = rope.rotary_dim // 2
    pairs = np.arange(half)
    if rope.pairing == Pairing.NEIGHBOURS:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, pairs + half
    unrotated = np.arange(rope.rotary_dim, head_dim)
    fill = head_dim // 2 - half
    return np.concatenate((first, unrotated[:fill], second, unrotated[fill:]))


def latent_order(spec: ModelSpec, attention: MLASpec, what: str) -> Order | None:
    """Return the checkpoint's row for each of our rows of a projection of latent attention; None if the order is equal.

    ``what``: our name of the projection, such as "q_b_proj". In each head, the rotated elements follow the others.
    """
    heads, still = attention.heads, attention.qk_nope_head_dim
    if what == "kv_a_proj":
        heads, still = 1, attention.kv_lora_rank
    elif what != ("q_proj" if attention.q_lora_rank is None else "q_b_proj"):
        return None
    turned = head_order(spec.ropes[attention.rope], attention.qk_rope_head_dim)
    if np.array_equal(turned, np.arange(len(turned))):
        return None
    order = np.concatenate((np.arange(still), still + turned))
    return (np.arange(heads)[:, None] * len(order) + order).ravel()


def row_order(spec: ModelSpec, name: str) -> Order | None:
    """Return the checkpoint's row for each row of our tensor ``name``; None if rows keep their order."""
    part = name.split(".")
    if part[0] != "layers":
        return None
    attention = spec.layers[int(part[1])].attention
    if isinstance(attention, MLASpec):
        return latent_order(spec, attention, part[2])
    if part[2] not in ("q_proj", "k_proj", "q_norm", "k_norm"):
        return None
    # A layer that knows no positions has no order of its own; files put its rows like those of the others.
    order = head_order(spec.ropes[attention.rope or 0], attention.head_dim)
    if np.array_equal(order, np.arange(attention.head_dim)):
        return None
    heads = attention.heads if part[2].startswith("q") else attention.kv_heads
    if part[2].endswith("norm") and attention.qk_norm == QKNorm.HEAD:
        heads = 1
    return (np.arange(heads)[:, None] * attention.head_dim + order).ravel()
