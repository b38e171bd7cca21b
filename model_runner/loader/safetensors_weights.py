"""Weights from the safetensors files of a Hugging Face folder."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...model_files.checkpoint import checkpoint_files
from ...model_files.errors import InvalidWeights, brief
from ...model_files.packed_names import is_beside, packing_of, refuse_stray_scales, weight_name
from ...model_files.spec import ModelSpec
from ...model_files.tensor_names import EMBEDDING, HEAD, find_parts
from .base import Stored, WeightSource, as_ours
from .mxfp4 import BLOCK_BYTES, BLOCKS, SCALES, dequantise
from .packed_weights import unpacked

log = logging.getLogger(__name__)


class SafetensorsWeights(WeightSource):
    """The tensors of a folder's checkpoint, memory-mapped."""

    def __init__(self, folder: Path, spec: ModelSpec, left_out: Container[str] = ()) -> None:
        """Open the safetensors files in ``folder`` as weights of ``spec``.

        ``left_out``: the engine's names of tensors that are not needed as floats. They are not read.
        """
        self._spec = spec
        self._folder = folder
        self._left_out = left_out
        self._files = checkpoint_files(folder)
        # A tied head that comes without a table of embeddings is the table.
        self._aliases = {HEAD: EMBEDDING} if spec.tied_head else {}
        self._packing = packing_of(folder)
        if self._packing is not None and not left_out:
            log.warning(
                "weights in %s are dequantised as they are read: nothing here multiplies them as they are, so they "
                "take the memory of the model's type, and activations are not quantised",
                self._packing.kind,
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors by the engine's names, dequantising weights in MXFP4, FP8 and four bits.

        Those left out are skipped. If the config ties the head to the table of embeddings and the files have only the
        head, it is yielded as the table. Raises ``InvalidWeights`` for files that are damaged or don't fit the config.
        """
        refuse_stray_scales(self._folder)
        places = _places(self._files)
        copies = self._tied_copies(places)
        for file in self._files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if places[name] != file or name in copies:
                        continue
                    if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in places:
                        continue
                    if (self._packing is not None and is_beside(name)) or self._is_left_out(name):
                        continue
                    tensor = tensors.get_tensor(name)
                    if self._packing is not None:
                        read = partial(_read, places=places, file=file, tensors=tensors)
                        name, tensor = unpacked(name, tensor, self._packing, read)
                    stored = _mxfp4(name, tensor, places) if name.endswith(BLOCKS) else _plain(tensor)
                    for ours, part in as_ours(self._spec, name, stored):
                        yield self._aliases.get(ours, ours), part

    def _tied_copies(self, places: Mapping[str, Path]) -> set[str]:
        """Return the file's name of the head if it repeats the table of embeddings and the config ties the two.

        Otherwise return an empty set. Raises ``InvalidWeights`` for a head with other values.
        """
        if not self._spec.tied_head:
            return set()
        of = {part.name: name for name in places for part in find_parts(self._spec, name)}
        if HEAD not in of or EMBEDDING not in of:
            return set()
        head, table = (_load(of[name], places[of[name]]) for name in (HEAD, EMBEDDING))
        if not _has_same_values(head, table):
            raise InvalidWeights(
                f"{places[of[HEAD]]} holds {of[HEAD]!r} with other values than the embeddings, but the config ties the "
                "two; set tie_word_embeddings to false in config.json to serve that head"
            )
        return {of[HEAD]}

    def _is_left_out(self, name: str) -> bool:
        parts = find_parts(self._spec, weight_name(name))
        return bool(parts) and all(part.name in self._left_out for part in parts)


def _places(files: Sequence[Path]) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name in the files; the first file if several hold equal copies.

    Raises ``InvalidWeights`` for copies that differ.
    """
    places: dict[str, Path] = {}
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                first = places.setdefault(name, file)
                if first != file and not _is_same(_load(name, first), tensors.get_tensor(name)):
                    raise InvalidWeights(
                        f"{first} and {file} hold {name!r} with different values; download the checkpoint again"
                    )
    return places


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors have the same type, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _has_same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors have the same shape and, whatever their types, exactly the same values."""
    if one.shape != other.shape:
        return False
    wider = one.dtype if one.dtype == other.dtype else torch.promote_types(*map(_plain_type, (one, other)))
    return torch.equal(one.to(wider), other.to(wider))


def _plain_type(tensor: Tensor) -> torch.dtype:
    """Return a type that holds all values of the tensor, and that torch has a common type with others for."""
    return tensor.dtype if tensor.dtype.itemsize > 1 else torch.float32


def _load(name: str, file: Path) -> Tensor:
    with _opened(file) as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as e:
        raise InvalidWeights(f"{file} can't be read: {brief(e)}; download it again") from e


def _read(name: str, places: Mapping[str, Path], file: Path, tensors: Any) -> Tensor | None:
    """Read the tensor ``name``, or return None if the files have none.

    ``places``: file of each tensor by name. ``tensors``: contents of the open ``file``, which mostly holds it. With
    many experts, opening a file for each tensor takes long.
    """
    if name not in places:
        return None
    with nullcontext(tensors) if places[name] == file else _opened(places[name]) as own:
        tensor: Tensor = own.get_tensor(name)
    return tensor


def _plain(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), lambda expert: tensor if expert is None else tensor[expert])


def _mxfp4(name: str, blocks: Tensor, places: dict[str, Path]) -> Stored:
    """Return the MXFP4 weight of ``blocks`` and their scales, which is dequantised only when it is read.

    ``name``: the file's name of ``blocks``. ``places``: file of each tensor by name, where the scales are found. A
    stack of matrices is dequantised one matrix at a time, because all of it would be large.
    """
    scales_name = name.removesuffix(BLOCKS) + SCALES
    if scales_name not in places:
        raise InvalidWeights(f"the checkpoint lacks {scales_name!r}")
    scales = _load(scales_name, places[scales_name])
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise InvalidWeights(f"{name!r} and its scales are of {blocks.dtype} and {scales.dtype}, not of bytes")
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1:] != (BLOCK_BYTES,):
        raise InvalidWeights(f"{name!r} has shape {list(blocks.shape)}, its scales {list(scales.shape)}")

    def read(expert: int | None) -> Tensor:
        return dequantise(blocks, scales) if expert is None else dequantise(blocks[expert], scales[expert])

    return Stored(tuple(blocks.shape), read)
