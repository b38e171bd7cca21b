"""Weights from the safetensors files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...model_files.checkpoint import checkpoint_files
from ...model_files.errors import InvalidWeights
from ...model_files.spec import ModelSpec
from .base import WeightSource, as_ours


class SafetensorsWeights(WeightSource):
    """The tensors of a folder's checkpoint, memory-mapped."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._spec = spec
        self._files = checkpoint_files(folder)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See the base class."""
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a dict
                        yield from as_ours(self._spec, name, tensors.get_tensor(name))
            except (SafetensorError, OSError) as e:
                raise InvalidWeights(f"{file} can't be read: {e}") from e
