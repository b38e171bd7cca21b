"""Models of families that pdserve lacks, for transformers' own classes to run: what their config.json says by itself.

Only what every process has to know, and what can be refused before anything is loaded. The model worker, where
transformers and torch are, refuses the rest (``model_runner/models/transformers/``).

Does not import torch, nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UnsupportedModel, naming
from .json_file import read_json_object
from .model_path import ModelSource

CONFIG = "config.json"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
"""What configs call the longest sequence; the first that is there counts."""
ATTENTION_TYPES = {"full_attention", "sliding_attention"}


class ForeignModel(NamedTuple):
    """``family``: its ``model_type``. ``context_length``: the longest sequence, in tokens."""

    family: str
    context_length: int
    vocab_size: int


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json; raises ``UnsupportedModel`` if it is missing or unreadable."""
    return read_json_object(folder / CONFIG, UnsupportedModel)


def read_foreign(source: ModelSource) -> ForeignModel:
    """Describe the model at ``source``, which transformers' own class is to run, from its config.json.

    Raises ``UnsupportedModel`` if the config is missing or incomplete, or if the model is known not to work. An untried
    model passes.
    """
    if source.kind == "gguf":
        raise UnsupportedModel("--model-impl transformers does not read GGUF files; take the model's safetensors")
    raw = read_hf_config(source.path)
    family = str(raw.get("model_type", "(none)"))
    with naming(source.path / CONFIG):
        reason = _refusal(raw)
        if reason is not None:
            raise UnsupportedModel(f"architecture {family!r}: {reason}")
        return ForeignModel(family, _integer(raw, CONTEXT_KEYS), _integer(raw, ("vocab_size",)))


def layer_types_refusal(types: object) -> str | None:
    """Return why layers of these types cannot be served; None if they can.

    ``types`` is a list as in configs, or None.
    """
    unknown = sorted({str(name) for name in types} - ATTENTION_TYPES) if isinstance(types, list | tuple) else []
    if not unknown:
        return None
    return f"layers of the types {', '.join(unknown)} are not supported, only full and sliding attention are"


def _refusal(raw: Mapping[str, Any]) -> str | None:
    if raw.get("is_encoder_decoder"):
        return "encoder-decoder models are not supported"
    if raw.get("quantization_config"):
        return "quantised safetensors are not supported; take the plain model"
    if any(isinstance(raw.get(key), dict) for key in ("text_config", "vision_config", "audio_config")):
        return "models of more than text are not supported by --model-impl transformers"
    if raw.get("kv_lora_rank"):
        return "latent attention (MLA), whose keys and values have different sizes, is not supported"
    return layer_types_refusal(raw.get("layer_types"))


def _integer(raw: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = raw.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModel(f"it says none of {', '.join(keys)}, without which the model can't be served")
