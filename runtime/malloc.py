"""What becomes of memory that a process frees."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of ``mallopt``, from glibc's ``malloc.h``."""
LARGE_BLOCK = 2**20
"""Bytes. A stream that repeats a text of 800 KiB copies it for each event: 0.6 ms if the kernel maps each copy anew, as
with glibc's own 128 KiB, 0.05 ms on the heap."""
MAX_KEPT = 8 * 2**20


def return_freed_memory() -> None:
    """Have blocks of ``LARGE_BLOCK`` bytes go back to the kernel when they are freed, and the heap's free end beyond
    ``MAX_KEPT``.

    Left to itself, glibc raises the first limit to the largest block that was ever freed, up to 32 MiB, and keeps twice
    as much: a process that parsed one large body holds on to it. Not for the model worker, whose steps take and free
    blocks of megabytes all the time. Nothing happens with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(M_TRIM_THRESHOLD, MAX_KEPT)


def trim() -> None:
    """Give what is free in the heap back to the kernel: worth a walk through it behind large things that are over."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
