"""The files that hold a model's weights, and how much they hold: read from their headers, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from .errors import InvalidWeights
from .model_path import ModelSource


class TensorSize(NamedTuple):
    """``values``: how many numbers it has. ``block_bytes``: what its blocks take; None where it is plain numbers."""

    name: str
    values: int
    block_bytes: int | None = None


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of the checkpoint. A folder may contain copies in other formats beside it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        if strange := sorted(repr(name) for name in names if Path(name).name != name or name == ".."):
            raise InvalidWeights(f"{index} names {strange[0]}: files of a checkpoint lie beside its index")
        return sorted(folder / name for name in names)
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise InvalidWeights(
        f"{folder} holds no model.safetensors; other formats must be converted first (--load-format dummy needs none)"
    )


def tensor_sizes(source: ModelSource) -> list[TensorSize]:
    """List every tensor of the model at ``source``; raises ``InvalidWeights`` for a missing or damaged file."""
    return list(_gguf_sizes(source.path) if source.kind == "gguf" else _safetensors_sizes(source.path))


def _gguf_sizes(path: Path) -> Iterator[TensorSize]:
    # Imported here: the gguf package takes a while, and only such files need it.
    from gguf import GGMLQuantizationType

    from .gguf_reader import GGUFFile

    plain = {GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "F64")}
    for name, tensor in GGUFFile(path).tensors.items():
        blocks = None if tensor.tensor_type in plain else int(tensor.n_bytes)
        yield TensorSize(name, int(tensor.n_elements), blocks)


def _safetensors_sizes(folder: Path) -> Iterator[TensorSize]:
    for file in checkpoint_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    values = math.prod(tensors.get_slice(name).get_shape())
                    # Several weights a number (MXFP4; AWQ, GPTQ, INT4), beside what scales them.
                    several = {"blocks": 2 * values, "scales": 0}.get(name.rpartition("_")[2], values)
                    packed = {"qweight": 8 * values, "weight_packed": 8 * values}
                    packed |= dict.fromkeys(("qzeros", "scales", "g_idx"), 0)
                    packed |= dict.fromkeys(("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"), 0)
                    weights = packed.get(name.rpartition(".")[2], several)
                    yield TensorSize(name, weights)
        except (SafetensorError, OSError) as e:
            raise InvalidWeights(f"{file} can't be read: {e}") from e
