"""How a model's makers pool hidden states to an embedding: ``modules.json`` of sentence-transformers."""

from __future__ import annotations

from typing import Any

import msgspec

from ..messages.readout import Pooling
from .errors import ModelError, brief
from .json_file import BROKEN_JSON, read_json_object
from .model_path import ModelSource

MODULES = "modules.json"
MODES: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
"""Pooling by the field of a Pooling module's configuration."""
KNOWN_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
"""Modules that are served. Embeddings are always normalised."""
ADVICE = "name the pooling by --pooling mean or --pooling last"


def read_pooling(source: ModelSource) -> Pooling:
    """Read the pooling that the model's files ask for; "last" if they say nothing.

    Raises ``ModelError`` if they ask for something else than "mean", "last" and a normalisation.
    """
    file = source.path / MODULES
    if source.kind == "gguf" or not file.is_file():
        return "last"
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except BROKEN_JSON as e:
        raise ModelError(f"{file} can't be read: {brief(e)}; correct it, or {ADVICE}") from e
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    if unknown := sorted(kinds.keys() - KNOWN_MODULES):
        raise ModelError(f"{file}: modules of type {', '.join(unknown)} are not served; to leave them out, {ADVICE}")
    if "Pooling" not in kinds:
        return "last"
    config_file = source.path / kinds["Pooling"] / "config.json"
    config = read_json_object(config_file, ModelError)
    asked = sorted(name for name, value in config.items() if name.startswith("pooling_mode_") and value is True)
    if len(asked) != 1 or asked[0] not in MODES:
        raise ModelError(f"{config_file} asks for {' and '.join(asked) or 'no pooling'}, which is not served; {ADVICE}")
    return MODES[asked[0]]
