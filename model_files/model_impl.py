"""The implementation of a model: pdserve's description of its family, or transformers' own class."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from .families.registry import is_known
from .foreign_config import read_hf_config
from .model_path import ModelSource

Wanted = Literal["auto", "native", "transformers"]
"""What ``--model-impl`` can say."""


class ModelImpl(StrEnum):
    """Implementations of a model: pdserve's description of its family, or transformers' own class."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"


def choose_model_impl(wanted: Wanted, source: ModelSource) -> ModelImpl:
    """Choose the implementation for the model at ``source``: "auto" is native for every family that pdserve knows.

    GGUF files are native: transformers would have to dequantise them. Raises ``UnsupportedModel`` without a config.
    """
    if wanted != "auto":
        return ModelImpl(wanted)
    if source.kind == "gguf" or is_known(read_hf_config(source.path)):
        return ModelImpl.NATIVE
    return ModelImpl.TRANSFORMERS
