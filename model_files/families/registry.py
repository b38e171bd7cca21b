"""The model families that can be served, by the names that files have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsupportedModel
from ..spec import ModelSpec
from . import llama, qwen
from .hf_config import HFConfig

if TYPE_CHECKING:
    from .gguf_config import GGUFConfig


class HFFamily(NamedTuple):
    """``defaults``: what a config means that does not have a key."""

    read: Callable[[HFConfig], ModelSpec]
    defaults: Mapping[str, Any]


HF = {
    "llama": HFFamily(llama.from_hf, {}),
    "mistral": HFFamily(llama.mistral_from_hf, {"sliding_window": 4096}),
    "qwen2": HFFamily(qwen.qwen2_from_hf, qwen.QWEN2_DEFAULTS),
    "qwen3": HFFamily(qwen.qwen3_from_hf, qwen.QWEN3_DEFAULTS),
}
"""By ``model_type`` of config.json."""
GGUF: dict[str, Callable[[GGUFConfig], ModelSpec]] = {
    "llama": llama.from_gguf,
    "qwen2": qwen.qwen2_from_gguf,
    "qwen3": qwen.qwen3_from_gguf,
}
"""By ``general.architecture``."""


def spec_from_hf(raw: Mapping[str, Any]) -> ModelSpec:
    """What a config.json means; raises ``UnsupportedModel``, or for a broken one ``KeyError`` and the like."""
    name = str(raw.get("model_type", "(none)"))
    if name not in HF:
        raise _unknown(name, HF)
    return HF[name].read(HFConfig(raw, HF[name].defaults))


def spec_from_gguf(config: GGUFConfig) -> ModelSpec:
    """What a file's metadata mean; raises ``UnsupportedModel`` or ``KeyError``."""
    if config.family not in GGUF:
        raise _unknown(config.family, GGUF)
    return GGUF[config.family](config)


def _unknown(name: str, known: Mapping[str, object]) -> UnsupportedModel:
    return UnsupportedModel(f"architecture {name!r} is not supported; supported are {', '.join(known)}")
