"""transformers reads a GGUF file in a fifth of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import gguf_reader


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Cache what transformers asks for repeatedly when it reads a GGUF file.

    That is gguf's table of tensor names, for every module of the model, and the file's contents, for the config and for
    the weights. It also slices plain arrays: a slice of a memory map costs many times as much, and the vocabulary has
    300,000.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        patch.setattr(gguf_reader, "np", _PlainMaps())
        yield


class _PlainMaps:
    """numpy with a ``memmap`` that gives an ordinary array of the same memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def memmap(self, *args: Any, **kwargs: Any) -> Any:
        return np.memmap(*args, **kwargs).view(np.ndarray)
