"""Python's cyclic garbage collector, kept away from objects that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For a block that imports: what it makes lives as long as the process, and is never looked at.

    Importing torch makes so many objects that a quarter of the time goes to looking for garbage among them (2.8 s with
    the collector, 2.1 s without, on two old cores).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
