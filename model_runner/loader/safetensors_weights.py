"""Weights from the safetensors files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...model_files.errors import InvalidWeights
from .base import WeightSource


class SafetensorsWeights(WeightSource):
    """The tensors of a folder's checkpoint, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._files = _checkpoint_files(folder)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See the base class."""
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a dict
                        yield name, tensors.get_tensor(name)
            except (SafetensorError, OSError) as e:
                raise InvalidWeights(f"{file} can't be read: {e}") from e


def _checkpoint_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint: a folder may hold copies in other shapes beside it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise InvalidWeights(
        f"{folder} holds no model.safetensors; other formats must be converted first (--load-format dummy needs none)"
    )
