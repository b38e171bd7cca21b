"""Samples: values that stand for a tensor when checkpoints are told apart. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...model_files.tensor_names import EMBEDDING
from .arrays import Array, as_bits, convert, float_type

SAMPLES = 64
OF_A_ROW = 4
"""Values of each row of the table of embeddings.

Adding tokens to a model may change their rows and nothing else, and the KV of prompts with them differs.
"""

Indices = npt.NDArray[np.int64]


class SampledPlaces(NamedTuple):
    """Where samples are taken in a tensor, seen as a matrix: all its rows, as long as its last dimension."""

    rows: Indices
    columns: Indices | None
    """None: the tensor is a vector, or a number."""


def spread(size: int) -> Indices:
    """Return ``SAMPLES`` indices below ``size``.

    They go by a prime step, so that rows and columns don't move in lockstep.
    """
    return np.arange(SAMPLES, dtype=np.int64) * 7919 % size


def sampled_places(name: str, shape: Sequence[int]) -> SampledPlaces:
    """Return where to sample a tensor of the engine's ``name`` that has elements.

    Of the table of embeddings, some values of every row are sampled.
    """
    if len(shape) < 2:
        return SampledPlaces(spread(math.prod(shape)), None)
    height, width = math.prod(shape[:-1]), shape[-1]
    if not name.endswith(EMBEDDING):
        return SampledPlaces(spread(height), spread(width))
    rows = np.repeat(np.arange(height, dtype=np.int64), OF_A_ROW)
    # By a prime step here, too; the values of one row lie apart.
    columns = (rows * 7919 + np.arange(len(rows)) % OF_A_ROW * (width // OF_A_ROW)) % width
    return SampledPlaces(rows, columns)


def sample(name: str, values: Array, dtype: str) -> bytes:
    """Return bytes that tell ``values``, converted to the type ``dtype``, from others with their name.

    They are name, shape, type and a few values.
    """
    found = as_bits(values)
    if values.size:
        rows, columns = sampled_places(name, values.shape)
        found = found.reshape(-1)[rows] if columns is None else found.reshape(-1, values.shape[-1])[rows, columns]
    converted = convert(found.view(values.dtype), float_type(dtype))
    return sample_header(name, values.shape, dtype) + converted.tobytes()


def sample_header(name: str, shape: Sequence[int], dtype: str) -> bytes:
    """Return what a sample begins with: name, shape and type of the tensor."""
    return f"{name}{list(shape)}torch.{dtype}".encode()
