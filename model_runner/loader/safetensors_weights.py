"""Weights from the safetensors files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...model_files.checkpoint import checkpoint_files
from ...model_files.errors import InvalidWeights
from ...model_files.spec import ModelSpec
from .base import Stored, WeightSource, as_ours
from .mxfp4 import BLOCK_BYTES, BLOCKS, SCALES, dequantise


class SafetensorsWeights(WeightSource):
    """The tensors of a folder's checkpoint, memory-mapped."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._spec = spec
        self._files = checkpoint_files(folder)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See the base class; weights in MXFP4 come dequantised."""
        places = self._places()
        for file in self._files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in places:
                        continue
                    tensor = tensors.get_tensor(name)
                    stored = _mxfp4(name, tensor, places) if name.endswith(BLOCKS) else _plain(tensor)
                    yield from as_ours(self._spec, name, stored)

    def _places(self) -> dict[str, Path]:
        """The file of each tensor."""
        places: dict[str, Path] = {}
        for file in self._files:
            with _opened(file) as tensors:
                places |= dict.fromkeys(tensors.keys(), file)
        return places


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as e:
        raise InvalidWeights(f"{file} can't be read: {e}") from e


def _plain(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), lambda expert: tensor if expert is None else tensor[expert])


def _mxfp4(name: str, blocks: Tensor, places: dict[str, Path]) -> Stored:
    """Its blocks, and the scales that lie elsewhere; a stack is dequantised matrix by matrix, as it would be large."""
    scales_name = name.removesuffix(BLOCKS) + SCALES
    if scales_name not in places:
        raise InvalidWeights(f"the checkpoint lacks {scales_name!r}")
    with _opened(places[scales_name]) as tensors:
        scales = tensors.get_tensor(scales_name)
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise InvalidWeights(f"{name!r} and its scales are of {blocks.dtype} and {scales.dtype}, not of bytes")
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1:] != (BLOCK_BYTES,):
        raise InvalidWeights(f"{name!r} has shape {list(blocks.shape)}, its scales {list(scales.shape)}")

    def read(expert: int | None) -> Tensor:
        return dequantise(blocks, scales) if expert is None else dequantise(blocks[expert], scales[expert])

    return Stored(tuple(blocks.shape), read)
