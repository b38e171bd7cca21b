"""The model families that the native model covers, and what sets each apart."""

from __future__ import annotations

from typing import NamedTuple

from .errors import UnsupportedModel


class Family(NamedTuple):
    """How a family departs from Llama.

    ``qkv_bias``: q, k and v have biases (None: the config's ``attention_bias`` says so, for the output projection too).
    ``qk_norm``: q and k are normalised a head at a time before the rotary embedding.
    ``windowed``: ``sliding_window`` alone counts; other families need ``use_sliding_window``, too.
    ``gguf_interleaved``: GGUF files hold the rows of q and k in llama.cpp's rotary order.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False
    windowed: bool = False
    gguf_interleaved: bool = False


# SmolLM and SmolLM2 call themselves "llama" everywhere, Mistral does in GGUF files.
FAMILIES = {
    "llama": Family(gguf_interleaved=True),
    "mistral": Family(qkv_bias=False, windowed=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}


def find_family(model_type: str) -> Family:
    """The family of a ``model_type`` (config.json) or ``general.architecture`` (GGUF); raises ``UnsupportedModel``."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModel(f"architecture {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    return family
