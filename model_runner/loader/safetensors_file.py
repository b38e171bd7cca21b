"""Reads tensors of safetensors files as NumPy arrays, mapped into memory. Imports no torch.

The library's own reader for NumPy copies each tensor, and knows neither bfloat16 nor FP8.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from ...model_files.errors import InvalidWeights, brief
from .arrays import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, Array, unknown_type

LENGTH_BYTES = 8
"""Bytes at the beginning of a file that say how long its header is."""
TYPES: dict[str, np.dtype[Any]] = {
    **{"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16},
    **{"F8_E4M3": FLOAT8_E4M3FN, "F8_E5M2": FLOAT8_E5M2, "BOOL": np.dtype(np.bool_)},
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
}
"""Types of elements, as the files name them."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """The tensors of an open file. Arrays that were read from it stay valid after it is closed."""

    def __init__(self, data: mmap.mmap) -> None:
        """Read the header of the mapped file ``data``, which the library has checked. Raises ``InvalidWeights``."""
        self._data = data
        self._begin = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        try:
            header = msgspec.json.decode(data[LENGTH_BYTES : self._begin], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            self._tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise InvalidWeights(f"its header is damaged ({brief(e)}); download it again") from e

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order in which they lie in the file."""
        return sorted(self._tensors, key=lambda name: self._tensors[name].data_offsets)

    def read(self, name: str) -> Array:
        """Return the tensor ``name`` as a view of the file. Writing to it changes this process's copy alone.

        A tensor of a type that ``TYPES`` lacks gets its shape and no values; ``is_float`` is false of it. Raises
        ``InvalidWeights``.
        """
        tensor = self._tensors[name]
        shape, dtype = tuple(tensor.shape), TYPES.get(tensor.dtype)
        if dtype is None:
            return np.broadcast_to(np.zeros((), unknown_type(tensor.dtype)), shape)
        if 0 in shape:
            return np.empty(shape, dtype)
        try:
            values: Array = np.ndarray(shape, dtype, self._data, self._begin + tensor.data_offsets[0])
        except (TypeError, ValueError) as e:
            raise InvalidWeights(f"{name!r} lies beyond the end of the file; download it again") from e
        return values if values.flags.aligned else values.copy()


@contextmanager
def opened(path: Path) -> Iterator[SafetensorsFile]:
    """Map the file at ``path`` and check its header. Errors of the block are raised as an ``InvalidWeights``."""
    try:
        # The library checks what the header says of the file.
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            yield SafetensorsFile(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except (SafetensorError, OSError) as e:
        raise InvalidWeights(f"{path} can't be read: {brief(e)}; download it again") from e
