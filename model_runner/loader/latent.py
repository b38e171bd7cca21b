"""The projections of latent attention that stand by head: how checkpoints spell them, and how we do.

Ours are the two that the absorbed form multiplies with (``models/latent_attention.py``): k_b_proj [heads *
kv_lora_rank, qk_nope_head_dim], which is transposed, and v_b_proj [heads * v_head_dim, kv_lora_rank]. llama.cpp has
them so too, as stacks of a matrix for each head. Hugging Face, and older GGUF files, have one kv_b_proj [heads *
(qk_nope_head_dim + v_head_dim), kv_lora_rank], a head's keys above its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...model_files.errors import InvalidWeights
from ...model_files.spec import MLASpec
from ...model_files.tensor_names import Part
from .arrays import Array, as_bits

BY_HEAD = ("k_b_proj", "v_b_proj")


def is_by_head(parts: Sequence[Part]) -> bool:
    """Return whether a tensor of these parts holds latent attention's k_b_proj or v_b_proj, for ``by_head``."""
    return parts[0].name.split(".")[-2] in BY_HEAD


def by_head(spec: MLASpec, parts: Sequence[Part], values: Array) -> Iterator[tuple[str, Array]]:
    """Yield the names and values of the ``parts`` that a checkpoint's tensor holds, in the engine's layout.

    ``parts``: k_b_proj, v_b_proj or both. A single one is a stack of matrices by head, and is flattened. Both are one
    kv_b_proj, and its number of rows must be right. Raises ``InvalidWeights`` for other dimensions.
    """
    if values.ndim < 2 or (len(parts) > 1 and values.ndim != 2):
        raise InvalidWeights(f"{parts[0].name!r} has shape {list(values.shape)}, which is no matrix")
    if len(parts) == 1:
        yield parts[0].name, _flattened(values)
        return
    heads = values.reshape(spec.heads, -1, values.shape[1])
    keys = heads[:, : spec.qk_nope_head_dim]
    yield parts[0].name, _flattened(keys.transpose(0, 2, 1))
    yield parts[1].name, _flattened(heads[:, spec.qk_nope_head_dim :])


def _flattened(heads: Array) -> Array:
    """Return a stack of matrices, one below the other."""
    return as_bits(heads).reshape(-1, heads.shape[-1]).view(heads.dtype)
