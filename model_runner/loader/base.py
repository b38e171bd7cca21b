"""Fills a model's weights from a source, whatever the format. Imports no torch."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from ...model_files.errors import InvalidWeights
from ...model_files.rope_order import row_order
from ...model_files.sharding import Slice
from ...model_files.spec import MLASpec, ModelSpec
from ...model_files.tensor_names import Part, find_parts, is_draft, is_not_needed
from ...runtime.progress import ProgressLog
from .arrays import Array, is_float, take_rows, type_name
from .latent import by_head, is_by_head
from .samples import sample

log = logging.getLogger(__name__)


class WeightSource(ABC):
    """Where weights come from."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield every tensor once, of any float type of ``arrays.py``, with the name that the engine has for it.

        Its rows are in the engine's order. A tensor without a known name keeps the one in the file, and the loader
        refuses it.
        """


class Stored(NamedTuple):
    """A checkpoint's tensor. ``read``: all of it, or of a stack of matrices the one with that number."""

    shape: tuple[int, ...]
    read: Callable[[int | None], Array]


def as_ours(spec: ModelSpec, name: str, stored: Stored) -> Iterator[tuple[str, Array]]:
    """Yield the parts of the checkpoint's tensor ``name`` under the engine's names.

    A tensor that holds several is cut, and the rows of q and k are put in the engine's order. An unknown tensor keeps
    its name; those of draft layers are skipped. Raises ``InvalidWeights`` if its number of rows or experts is not that
    of its parts together.
    """
    parts = find_parts(spec, name)
    if not parts:
        if not is_draft(spec, name):
            yield name, stored.read(None)
        return
    if not stored.shape:
        raise InvalidWeights(f"{name!r} is a single number")
    if parts[-1].expert is not None and stored.shape[0] != parts[-1].expert + 1:
        raise InvalidWeights(f"{name!r} is of {stored.shape[0]} experts, the config means {parts[-1].expert + 1}")
    for expert, group in groupby(parts, lambda part: part.expert):
        yield from _cut(spec, name, stored.read(expert), tuple(group))


def _cut(spec: ModelSpec, name: str, values: Array, parts: tuple[Part, ...]) -> Iterator[tuple[str, Array]]:
    if parts[0].transposed:
        values = values.T
    rows = sum(part.rows or 0 for part in parts)
    if len(parts) > 1 and values.shape[0] != rows:
        raise InvalidWeights(f"{name!r} has {values.shape[0]} rows, the config means {rows}")
    attention = spec.layers[int(parts[0].name.split(".")[1])].attention if is_by_head(parts) else None
    if isinstance(attention, MLASpec):
        yield from by_head(attention, parts, values)
        return
    for part in parts:
        own = values[part.where]
        order = row_order(spec, part.name)
        if order is not None and len(order) == own.shape[0]:
            own = take_rows(own, order)
        # Some files have a matrix of one row as a vector.
        yield part.name, own[None] if own.ndim == 1 and part.name.endswith("shared_gate.weight") else own


class WeightPlace(ABC):
    """Memory that takes a weight, or a rank's part of one."""

    nbytes: int
    dtype: str
    """Name of the type that weights have there, such as "bfloat16"."""

    @abstractmethod
    def take(self, values: Array) -> None:
        """Copy floats of the place's shape into it, and convert them to its type."""

    @abstractmethod
    def clear(self) -> None:
        """Fill the place with 0."""


class Target(NamedTuple):
    """What takes a tensor: ``place``, all of it or ``part``, of the ``shape`` that the checkpoint should have."""

    place: WeightPlace
    shape: tuple[int, ...]
    part: Slice | None = None

    def take(self, values: Array) -> None:
        """Copy ``values``, the whole weight, or this rank's part of it into the place, converting its type.

        An empty part clears the place. Rows that are not taken are never read from a file that is mapped.
        """
        part = self.part
        if part is None:
            self.place.take(values)
        elif part.size:
            self.place.take(values[(*[slice(None)] * part.axis, slice(part.begin, part.begin + part.size))])
        else:
            self.place.clear()


def load_weights(targets: Mapping[str, Target], source: WeightSource) -> dict[str, bytes]:
    """Fill ``targets`` (by name) from ``source``. Raises ``InvalidWeights`` unless names and shapes match exactly.

    Return a few values of each tensor by name, as bytes for ``fingerprint``. They are of the whole tensor, whatever
    part of it was taken.
    """
    missing = dict(targets)
    samples = {}
    progress = ProgressLog(log, "loading the weights", sum(target.place.nbytes for target in targets.values()))
    for name, values in source.tensors():
        target = missing.pop(name, None)
        if target is None:
            if name in samples:
                raise InvalidWeights(f"the checkpoint holds {name!r} under two names; convert it again")
            # A network of no size may lie in the file all the same.
            if is_not_needed(name) or not values.size:
                continue
            raise InvalidWeights(f"the checkpoint holds {name!r}, which its config does not account for")
        if target.shape != values.shape:
            raise InvalidWeights(f"{name!r} has shape {list(values.shape)}, the config means {list(target.shape)}")
        if not is_float(values.dtype):
            raise InvalidWeights(f"{name!r} is of {type_name(values.dtype)}, not of a float type")
        target.take(values)
        samples[name] = sample(name, values, target.place.dtype)
        progress.advance(target.place.nbytes)
    if missing:
        raise InvalidWeights(f"the checkpoint lacks {len(missing)} tensors, {next(iter(missing))!r} among them")
    return samples
