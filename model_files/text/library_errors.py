"""Errors of the ``tokenizers`` library, which has no type of its own for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import brief
from .errors import TextError

PANIC = "PanicException"
"""Name of the type of panics in Rust. It can't be imported, and derives from ``BaseException``."""


@contextmanager
def library_errors(error: Callable[[str], TextError]) -> Iterator[None]:
    """Turn whatever the library raises in the block, panics included, into ``error(message)``.

    ``TextError`` and ``MemoryError`` pass unchanged.
    """
    try:
        yield
    except (TextError, MemoryError):
        raise
    except BaseException as e:  # a panic is no Exception; what else is none passes on
        if isinstance(e, Exception) or type(e).__name__ == PANIC:
            raise error(brief(e)) from e
        raise
