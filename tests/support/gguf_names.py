"""transformers reads a GGUF file in a third of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import gguf
import pytest


@contextmanager
def quick_gguf_names() -> Iterator[None]:
    """Make gguf's table of tensor names once: transformers asks for the same one again for every module of the model,
    which is most of the time that it takes to load one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield
