"""Reads a model's config, whichever way its files spell it."""

from __future__ import annotations

from .config import ModelConfig
from .model_path import ModelSource


def read_config(source: ModelSource) -> ModelConfig:
    """The config of the model at ``source``; raises ``UnsupportedModel``."""
    # Imported here: the gguf package takes a while, and only such files need it.
    if source.kind == "gguf":
        from .config_gguf import read_gguf_config

        return read_gguf_config(source.path)
    from .config_hf import read_hf_config

    return read_hf_config(source.path)
