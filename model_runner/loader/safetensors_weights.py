"""Weights from the safetensors files of a Hugging Face folder. Imports torch to dequantise those that are packed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...model_files.checkpoint import checkpoint_files
from ...model_files.errors import InvalidWeights
from ...model_files.packed_names import is_beside, is_packed, packing_of, refuse_stray_scales, weight_name
from ...model_files.spec import ModelSpec
from ...model_files.tensor_names import EMBEDDING, HEAD, find_parts
from ..torch_import import note_torch
from .arrays import FLOAT8_E4M3FN, Array, as_bits, have_same_values, type_name
from .base import Stored, WeightSource, as_ours
from .mxfp4 import BLOCK_BYTES, BLOCKS, SCALES, dequantise
from .safetensors_file import SafetensorsFile, opened

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

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield the checkpoint's tensors by the engine's names, dequantising weights in MXFP4, FP8 and four bits.

        Those left out are skipped. If the config ties the head to the table of embeddings and the files have only the
        head, it is yielded as the table. Raises ``InvalidWeights`` for files that are damaged or don't fit the config.
        """
        refuse_stray_scales(self._folder)
        places = _places(self._files)
        copies = self._tied_copies(places)
        for file in self._files:
            with opened(file) as tensors:
                for name in tensors.names():
                    if places[name] != file or name in copies:
                        continue
                    if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in places:
                        continue
                    if (self._packing is not None and is_beside(name)) or self._is_left_out(name):
                        continue
                    read = partial(_read, places, file, tensors)
                    name, values = self._unpacked(name, tensors.read(name), read)
                    stored = _mxfp4(name, values, places) if name.endswith(BLOCKS) else _plain(values)
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
        if not have_same_values(head, table):
            raise InvalidWeights(
                f"{places[of[HEAD]]} holds {of[HEAD]!r} with other values than the embeddings, but the config ties the "
                "two; set tie_word_embeddings to false in config.json to serve that head"
            )
        return {of[HEAD]}

    def _unpacked(self, name: str, values: Array, read: Callable[[str], Array | None]) -> tuple[str, Array]:
        """Return the weight's own name and its dequantised values, or both unchanged if they are not packed.

        ``read`` returns a tensor by name, such as the scales, or None. Raises ``InvalidWeights``.
        """
        dtype = "F8_E4M3" if values.dtype == FLOAT8_E4M3FN else ""
        if self._packing is None or not is_packed(name, dtype, self._packing):
            return name, values
        note_torch(f"weights in {self._packing.kind}, which are dequantised")
        from .packed_weights import unpacked
        from .tensors import to_array, to_tensor

        def read_tensor(name: str) -> Any:
            found = read(name)
            return None if found is None else to_tensor(found)

        weight, tensor = unpacked(name, to_tensor(values), self._packing, read_tensor)
        return weight, to_array(tensor)

    def _is_left_out(self, name: str) -> bool:
        parts = find_parts(self._spec, weight_name(name))
        return bool(parts) and all(part.name in self._left_out for part in parts)


def _places(files: Sequence[Path]) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name in the files; the first file if several hold equal copies.

    Raises ``InvalidWeights`` for copies that differ.
    """
    places: dict[str, Path] = {}
    for file in files:
        with opened(file) as tensors:
            for name in tensors.names():
                first = places.setdefault(name, file)
                if first != file and not _is_same(_load(name, first), tensors.read(name)):
                    raise InvalidWeights(
                        f"{first} and {file} hold {name!r} with different values; download the checkpoint again"
                    )
    return places


def _is_same(one: Array, other: Array) -> bool:
    """Return whether both tensors have the same type, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (as_bits(each).view(f"u{each.itemsize}") for each in (one, other))
    return np.array_equal(first, second)


def _load(name: str, file: Path) -> Array:
    with opened(file) as tensors:
        return tensors.read(name)


def _read(places: Mapping[str, Path], file: Path, tensors: SafetensorsFile, name: str) -> Array | None:
    """Read the tensor ``name``, or return None if the files have none.

    ``places``: file of each tensor by name. ``tensors``: contents of the open ``file``, which mostly holds it. With
    many experts, opening a file for each tensor takes long.
    """
    if name not in places:
        return None
    with nullcontext(tensors) if places[name] == file else opened(places[name]) as own:
        return own.read(name)


def _plain(values: Array) -> Stored:
    return Stored(values.shape, lambda expert: values if expert is None else values[expert])


def _mxfp4(name: str, blocks: Array, places: dict[str, Path]) -> Stored:
    """Return the MXFP4 weight of ``blocks`` and their scales, which is dequantised only when it is read.

    ``name``: the file's name of ``blocks``. ``places``: file of each tensor by name, where the scales are found. A
    stack of matrices is dequantised one matrix at a time, because all of it would be large.
    """
    scales_name = name.removesuffix(BLOCKS) + SCALES
    if scales_name not in places:
        raise InvalidWeights(f"the checkpoint lacks {scales_name!r}")
    scales = _load(scales_name, places[scales_name])
    kinds = type_name(blocks.dtype), type_name(scales.dtype)
    if kinds != ("uint8", "uint8"):
        raise InvalidWeights(f"{name!r} and its scales are of {kinds[0]} and {kinds[1]}, not of bytes")
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1:] != (BLOCK_BYTES,):
        raise InvalidWeights(f"{name!r} has shape {list(blocks.shape)}, its scales {list(scales.shape)}")

    def read(expert: int | None) -> Array:
        return dequantise(blocks, scales) if expert is None else dequantise(blocks[expert], scales[expert])

    return Stored(blocks.shape, read)
