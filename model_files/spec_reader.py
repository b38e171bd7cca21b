"""Reads what a model is, whichever way its files spell it."""

from __future__ import annotations

from pathlib import Path

from .errors import UnsupportedModel, reading
from .families.registry import spec_from_gguf, spec_from_hf
from .json_file import read_json_object
from .model_path import ModelSource
from .spec import ModelSpec


def read_spec(source: ModelSource) -> ModelSpec:
    """Describe the model at ``source``, from its config.json or its GGUF metadata.

    Raises ``UnsupportedModel`` or ``InvalidWeights``.
    """
    return _read_gguf(source.path) if source.kind == "gguf" else _read_hf(source.path)


def _read_gguf(path: Path) -> ModelSpec:
    # Imported here: the gguf package takes a while, and only such files need it.
    from .families.gguf_config import GGUFConfig
    from .gguf_reader import GGUFFile

    file = GGUFFile(path)
    with reading(path, "has no usable metadata"):
        return spec_from_gguf(GGUFConfig(file))


def _read_hf(folder: Path) -> ModelSpec:
    file = folder / "config.json"
    raw = read_json_object(file, UnsupportedModel)
    with reading(file, "is no usable model config"):
        return spec_from_hf(raw)
