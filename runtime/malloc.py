"""What becomes of memory that a process frees."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``, from glibc's ``malloc.h``."""
LARGE_BLOCK = 2**20
"""Bytes from which a block gets a mapping of its own.

A stream that repeats a text of 800 KiB copies it for each event. That takes 0.6 ms if the kernel maps each copy anew,
as with glibc's own limit of 128 KiB, and 0.05 ms on the heap.
"""
MAX_KEPT = 8 * 2**20


def return_freed_memory() -> None:
    """Have glibc return memory to the kernel when it is freed, from now on.

    Blocks of ``LARGE_BLOCK`` bytes or more are returned at once. So is the free end of a heap above ``MAX_KEPT`` bytes.
    By default, glibc raises the first limit to the largest block ever freed, up to 32 MiB, and keeps twice as much. So
    a process that parsed one large body keeps its memory. The model worker does not call this, because its steps take
    and free megabytes all the time. With another C library nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(M_TRIM_THRESHOLD, MAX_KEPT)


def trim() -> None:
    """Return the free memory inside glibc's heap to the kernel now. With another C library nothing happens.

    It walks through the heap, so it is worth its time only after large objects were freed.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
