"""What the model's files say about it, for clients that list models."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ....model_files.errors import ModelError
from ....model_files.gguf_layout import BrokenGGUF, mapped, read_metadata
from ....model_files.json_file import read_json_object
from ....model_files.model_path import ModelSource, resolve_model
from .answers import OllamaDetails
from .writer import rfc3339

QUANTISATION = re.compile(r"(?<![A-Za-z0-9])(I?Q\d(?:_[A-Z0-9]+)*|BF16|F16|F32)(?![A-Za-z0-9])", re.IGNORECASE)
"""Name of a quantisation in the name of a GGUF file."""


class ModelFiles(NamedTuple):
    """Facts of the model's files. Texts are empty if the files do not say it."""

    format: str = ""
    family: str = ""
    parameter_size: str = ""
    quantisation: str = ""
    size: int = 0
    """Bytes of the files with weights."""
    modified: float = 0.0
    """Unix time of the newest of them."""

    @property
    def digest(self) -> str:
        """Return 64 hexadecimal digits that change with these facts."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @property
    def modified_at(self) -> str:
        """Return ``modified`` as Ollama writes times."""
        return rfc3339(datetime.fromtimestamp(self.modified, UTC))

    @property
    def details(self) -> OllamaDetails:
        """Return the facts under Ollama's names."""
        return OllamaDetails(
            parent_model="",
            format=self.format,
            family=self.family,
            families=[self.family] if self.family else [],
            parameter_size=self.parameter_size,
            quantization_level=self.quantisation,
        )


@lru_cache(maxsize=1)
def read_model_files(path: str, revision: str | None) -> ModelFiles:
    """Read the facts of the files of ``path`` and ``revision`` once. Facts that can't be read are left out.

    A server's files do not change while it runs.
    """
    try:
        source = resolve_model(path, revision=revision, download=False)
        return _of_gguf(source.path) if source.kind == "gguf" else _of_folder(source)
    except (ModelError, BrokenGGUF, OSError):
        return ModelFiles()


def _of_gguf(file: Path) -> ModelFiles:
    with mapped(file) as data:
        values = read_metadata(data, longest=0).values
    named = QUANTISATION.search(file.name)
    return ModelFiles(
        "gguf",
        _text(values, "general.architecture"),
        _text(values, "general.size_label"),
        named[0].upper() if named is not None else "",
        *_sizes([file]),
    )


def _of_folder(source: ModelSource) -> ModelFiles:
    config = read_json_object(source.path / "config.json", ModelError)
    quantised = config.get("quantization_config")
    method = _text(quantised, "quant_method") if isinstance(quantised, dict) else ""
    dtype = _text(config, "dtype") or _text(config, "torch_dtype")
    sizes = _sizes(sorted(source.path.glob("*.safetensors")) or [source.path / "config.json"])
    return ModelFiles("safetensors", _text(config, "model_type"), "", method or dtype, *sizes)


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""


def _sizes(files: list[Path]) -> tuple[int, float]:
    """Return the bytes of ``files``, and the time at which the newest one was changed."""
    facts = [file.stat() for file in files]
    return sum(fact.st_size for fact in facts), max(fact.st_mtime for fact in facts)
