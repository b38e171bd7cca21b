"""The files that hold a model's weights, and how much they hold: read from their headers, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from .errors import InvalidWeights, brief, shortened
from .json_file import BROKEN_JSON
from .model_path import ModelSource

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class TensorSize(NamedTuple):
    """``values``: how many numbers it has. ``block_bytes``: what its blocks take; None where it is plain numbers."""

    name: str
    values: int
    block_bytes: int | None = None


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of the checkpoint, as transformers chooses them: the single file, or those of the index.

    A folder may contain copies in other formats beside it. Raises ``InvalidWeights``.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    if any(folder.glob("*.safetensors")):
        raise InvalidWeights(f"{folder} holds neither {SINGLE} nor {INDEX}, which names the other files; download it")
    raise InvalidWeights(
        f"{folder} holds no {SINGLE}; other formats must be converted first (--load-format dummy needs none)"
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except BROKEN_JSON as e:
        raise InvalidWeights(f"{index} is no usable index of a checkpoint: {brief(e)}; download it again") from e
    if strange := sorted(repr(name) for name in names if Path(name).name != name or name == ".."):
        raise InvalidWeights(f"{index} names {shortened(strange[0])}: files of a checkpoint lie beside its index")
    files = sorted(index.parent / name for name in names)
    if not files:
        raise InvalidWeights(f"{index} names no files; download it again")
    for file in files:
        if not _is_file(file):
            raise InvalidWeights(f"{index} names {shortened(file.name)}, which is not beside it; download that file")
    return files


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:
        return False  # no system has names of this length


def tensor_sizes(source: ModelSource) -> list[TensorSize]:
    """List the tensors of the model at ``source`` with their numbers of weights, read from the files' headers alone.

    Raises ``InvalidWeights`` for a missing or damaged file.
    """
    return list(_gguf_sizes(source.path) if source.kind == "gguf" else _safetensors_sizes(source.path))


def _gguf_sizes(path: Path) -> Iterator[TensorSize]:
    # Imported here: the gguf package takes a while, and only such files need it.
    from gguf import GGMLQuantizationType

    from .gguf_reader import GGUFFile

    plain = {GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "F64")}
    for name, tensor in GGUFFile(path).tensors.items():
        blocks = None if tensor.tensor_type in plain else int(tensor.n_bytes)
        yield TensorSize(name, int(tensor.n_elements), blocks)


def tensor_types(folder: Path) -> dict[str, str]:
    """Return the type of each tensor of the checkpoint in ``folder``, as safetensors calls it, by name.

    Reads headers alone. Raises ``InvalidWeights`` for a missing or damaged file.
    """
    return {name: header.get_dtype() for name, header in _headers(folder)}


def _safetensors_sizes(folder: Path) -> Iterator[TensorSize]:
    for name, header in _headers(folder):
        values = math.prod(header.get_shape())
        # Several weights a number (MXFP4; AWQ, GPTQ, INT4), beside what scales them.
        several = {"blocks": 2 * values, "scales": 0}.get(name.rpartition("_")[2], values)
        packed = {"qweight": 8 * values, "weight_packed": 8 * values}
        packed |= dict.fromkeys(("qzeros", "scales", "g_idx"), 0)
        packed |= dict.fromkeys(("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"), 0)
        yield TensorSize(name, packed.get(name.rpartition(".")[2], several))


def _headers(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name of each tensor of a folder, and the library's object that has its type and shape.

    Raises ``InvalidWeights`` for a missing or damaged file.
    """
    for file in checkpoint_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    yield name, tensors.get_slice(name)
        except (SafetensorError, OSError) as e:
            raise InvalidWeights(f"{file} can't be read: {brief(e)}; download it again") from e
