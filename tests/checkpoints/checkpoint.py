"""A checkpoint in memory, to be changed and written."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
MAP, GENERATION = "special_tokens_map.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class Checkpoint:
    """The files of a folder: JSON by name, as objects or bytes, and weights by name, as tensors or bytes."""

    json: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Mapping[str, Tensor] | bytes | Path] = field(default_factory=dict)
    """A path is a file that is linked: writing the same tensors again takes time."""
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    """The ``__metadata__`` of safetensors that are written."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """All tensors of the unchanged checkpoint."""

    def copy(self) -> Checkpoint:
        """Return a checkpoint that can be changed without changing this one. Tensors are shared."""
        return Checkpoint(copy.deepcopy(self.json), dict(self.weights), dict(self.metadata), self.tensors)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        config: dict[str, Any] = self.json[CONFIG]
        return config

    def write(self, folder: Path) -> None:
        """Write all files into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.json.items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        for name, tensors in self.weights.items():
            if isinstance(tensors, Path):
                os.link(tensors, folder / name)
            else:
                data = tensors if isinstance(tensors, bytes) else save(dict(tensors), self.metadata)
                (folder / name).write_bytes(data)

    def bytes_of(self, tensors: Mapping[str, Tensor]) -> bytes:
        """Return a safetensors file with ``tensors``."""
        return bytes(save(dict(tensors), self.metadata))

    def shard(self, parts: Mapping[str, Mapping[str, Tensor]], index: Any = None) -> None:
        """Hold the weights in the files ``parts`` instead of one. ``index``: the index; None: the right one."""
        self.weights = dict(parts)
        weight_map = {name: file for file, tensors in parts.items() for name in tensors}
        self.json[INDEX] = {"metadata": {}, "weight_map": weight_map} if index is None else index


Change = Callable[[Checkpoint], object]
"""Changes a checkpoint in place."""


def unchanged(_: Checkpoint) -> None:
    """Leave the checkpoint as it is."""


def put(file: str, key: str, value: Any) -> Change:
    """Return a change that states ``value`` under ``key`` of the JSON file."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.json.setdefault(file, {})[key] = copy.deepcopy(value)

    return change


def drop(file: str, *keys: str) -> Change:
    """Return a change that takes ``keys`` out of the JSON file."""

    def change(checkpoint: Checkpoint) -> None:
        for key in keys:
            checkpoint.json.get(file, {}).pop(key, None)

    return change


def of_config(**values: Any) -> Change:
    """Return a change that states ``values`` in config.json."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.config.update(copy.deepcopy(values))

    return change


def both(*changes: Change) -> Change:
    """Return a change that makes ``changes`` one after another."""

    def change(checkpoint: Checkpoint) -> None:
        for one in changes:
            one(checkpoint)

    return change
