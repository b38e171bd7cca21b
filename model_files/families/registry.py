"""The model families that can be served, by the names that files have for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsupportedModel, reading_keys, unusable
from ..spec import ModelSpec
from . import deepseek, gemma, glm, gpt_oss, granite, llama, mixtral, olmo, phi, qwen, qwen_moe, smollm3
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
    "smollm3": HFFamily(smollm3.from_hf, smollm3.DEFAULTS),
    "gemma2": HFFamily(gemma.gemma2_from_hf, gemma.GEMMA2_DEFAULTS),
    "gemma3_text": HFFamily(gemma.gemma3_from_hf, gemma.GEMMA3_DEFAULTS),
    "phi3": HFFamily(phi.from_hf, phi.DEFAULTS),
    "olmo2": HFFamily(olmo.olmo2_from_hf, olmo.OLMO2_DEFAULTS),
    "olmo3": HFFamily(olmo.olmo3_from_hf, olmo.OLMO3_DEFAULTS),
    "granite": HFFamily(granite.from_hf, {}),
    "glm": HFFamily(glm.glm_from_hf, glm.DEFAULTS),
    "glm4": HFFamily(glm.glm4_from_hf, glm.DEFAULTS),
    "mixtral": HFFamily(mixtral.from_hf, mixtral.DEFAULTS),
    "qwen2_moe": HFFamily(qwen_moe.qwen2_from_hf, qwen_moe.QWEN2_DEFAULTS),
    "qwen3_moe": HFFamily(qwen_moe.qwen3_from_hf, qwen_moe.QWEN3_DEFAULTS),
    "gpt_oss": HFFamily(gpt_oss.from_hf, gpt_oss.DEFAULTS),
    "deepseek_v2": HFFamily(deepseek.v2_from_hf, deepseek.V2_DEFAULTS),
    "deepseek_v3": HFFamily(deepseek.v3_from_hf, deepseek.V3_DEFAULTS),
}
"""Families by the ``model_type`` of config.json."""
TEXT_OF = {"gemma3": "gemma3_text"}
"""Family of the ``text_config`` of models for texts and images. Only their text part is served."""
GGUF: dict[str, Callable[[GGUFConfig], ModelSpec]] = {
    "llama": llama.from_gguf,
    "qwen2": qwen.qwen2_from_gguf,
    "qwen3": qwen.qwen3_from_gguf,
    "smollm3": smollm3.from_gguf,
    "gemma2": gemma.gemma2_from_gguf,
    "gemma3": gemma.gemma3_from_gguf,
    "phi3": phi.from_gguf,
    "olmo2": olmo.from_gguf,
    "granite": granite.from_gguf,
    "chatglm": glm.from_gguf,
    "glm4": glm.from_gguf,
    "qwen2moe": qwen_moe.qwen2_from_gguf,
    "qwen3moe": qwen_moe.qwen3_from_gguf,
    "gpt-oss": gpt_oss.from_gguf,
    "deepseek2": deepseek.from_gguf,
}
"""Families by the ``general.architecture`` of a GGUF."""


def is_known(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a family that pdserve itself implements."""
    return str(raw.get("model_type")) in (HF.keys() | TEXT_OF.keys())


def spec_from_hf(raw: Mapping[str, Any]) -> ModelSpec:
    """Describe the model of a config.json.

    Raises ``UnsupportedModel``, and ``KeyError`` or others for a broken config.
    """
    name = str(raw.get("model_type", "(none)"))
    if name in TEXT_OF:
        name = TEXT_OF[name]
        text = raw["text_config"]
        if not isinstance(text, dict):
            raise unusable("text_config", text, "it must be an object")
        tied = raw.get("tie_word_embeddings", True)
        # These belong to the whole model. What its text_config says of the head does not count.
        whole = {
            "quantization_config": raw.get("quantization_config") or text.get("quantization_config"),
            # A null is allowed here, and means false.
            "tie_word_embeddings": False if tied is None else tied,
        }
        raw = {**text, **whole, "model_type": name}
    if name not in HF:
        raise _unknown(name, [*HF, *TEXT_OF], "; --model-impl transformers runs others, by transformers' own classes")
    config = HFConfig(raw, HF[name].defaults)
    with reading_keys(config):
        return HF[name].read(config)


def spec_from_gguf(config: GGUFConfig) -> ModelSpec:
    """Describe the model of a GGUF's metadata. Raises ``UnsupportedModel``, and ``KeyError`` for a missing key."""
    if config.family not in GGUF:
        raise _unknown(config.family, GGUF)
    with reading_keys(config):
        return GGUF[config.family](config)


def _unknown(name: str, known: Iterable[str], advice: str = "") -> UnsupportedModel:
    return UnsupportedModel(f"architecture {name!r} is not supported; supported are {', '.join(known)}{advice}")
