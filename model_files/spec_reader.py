"""Reads what a model is, whichever way its files spell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from .errors import UnsupportedModel
from .families.registry import spec_from_gguf, spec_from_hf
from .model_path import ModelSource
from .spec import ModelSpec


def read_spec(source: ModelSource) -> ModelSpec:
    """Read the model at ``source``; raises ``UnsupportedModel`` or ``InvalidWeights``."""
    return _read_gguf(source.path) if source.kind == "gguf" else _read_hf(source.path)


def _read_gguf(path: Path) -> ModelSpec:
    # Imported here: the gguf package takes a while, and only such files need it.
    from .families.gguf_config import GGUFConfig
    from .gguf_reader import GGUFFile

    file = GGUFFile(path)
    try:
        return spec_from_gguf(GGUFConfig(file))
    except UnsupportedModel as e:
        raise UnsupportedModel(f"{path}: {e}") from e
    except KeyError as e:
        raise UnsupportedModel(f"{path} lacks the metadata {e}") from e
    except (TypeError, ValueError, ArithmeticError) as e:
        raise UnsupportedModel(f"{path} has no usable metadata: {e.__class__.__name__}: {e}") from e


def _read_hf(folder: Path) -> ModelSpec:
    file = folder / "config.json"
    try:
        return spec_from_hf(msgspec.json.decode(file.read_bytes(), type=dict[str, Any]))
    except UnsupportedModel as e:
        raise UnsupportedModel(f"{file}: {e}") from e
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, OSError, msgspec.MsgspecError) as e:
        raise UnsupportedModel(f"{file} is no usable model config: {e.__class__.__name__}: {e}") from e
