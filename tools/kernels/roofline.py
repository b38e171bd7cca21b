"""What this machine can do at best, measured: the two limits that a forward pass is held against.

The roofline of a pass is the longer of (bytes that it must read) / bandwidth and (its operations) / peak; Williams,
Waterman, Patterson 2009. Virtual machines' memory bandwidth drifts, so ``bench.py`` asks again around each figure.
"""

from __future__ import annotations

import time
from ctypes import CDLL, c_char_p, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

import numpy as np

from pdserve.model_runner.cpu_engine.build import build, choose_level

SOURCES = Path(__file__).parent / "probe"
MEMORY = 512 << 20
"""Bytes to read: many times any cache."""
ROUNDS = 400_000
REPEATS = 5


class ProductKind(IntEnum):
    """What a pass multiplies, as probe/roofline.cpp counts the kinds."""

    FLOAT32 = 0
    BFLOAT16 = 1
    BYTES = 2


class Roofline:
    """Measures on ``cpus``, one thread on each. Keeps ``MEMORY`` bytes until the process ends."""

    def __init__(self, cpus: list[int]) -> None:
        """Compile the measuring code and reserve memory for it.

        Raises ``BuildError`` if there is no compiler, ``MemoryError`` if there is too little memory.
        """
        library = CDLL(str(build(choose_level(), SOURCES, "roofline")))
        library.pds_roofline_memory.restype = c_void_p
        library.pds_roofline_memory.argtypes = (c_int64,)
        library.pds_roofline_read.restype = None
        library.pds_roofline_read.argtypes = (c_void_p, c_int64, c_int32, c_void_p)
        library.pds_roofline_multiply.restype = c_int64
        library.pds_roofline_multiply.argtypes = (c_int32, c_int64, c_int32, c_void_p)
        library.pds_roofline_kind.restype = c_char_p
        library.pds_roofline_kind.argtypes = (c_int32,)
        self._library = library
        self._cpus = np.array(cpus, dtype=np.int32)
        self._memory = library.pds_roofline_memory(MEMORY)
        if not self._memory:
            raise MemoryError(f"no {MEMORY >> 20} MiB to measure the memory's bandwidth with")

    def bandwidth(self) -> float:
        """Measure how many bytes per second all threads read together: the best of a few readings."""
        threads = len(self._cpus)
        nbytes = MEMORY // (256 * threads) * 256 * threads
        best = np.inf
        for _ in range(REPEATS):
            begin = time.perf_counter()
            self._library.pds_roofline_read(self._memory, nbytes, threads, self._cpus.ctypes.data)
            best = min(best, time.perf_counter() - begin)
        return nbytes / float(best)

    def peak(self, kind: ProductKind) -> float:
        """Measure how many operations per second all threads do together in products of ``kind``.

        Return the best of a few runs.
        """
        threads = len(self._cpus)
        best = np.inf
        operations = 0
        for _ in range(REPEATS):
            begin = time.perf_counter()
            operations = self._library.pds_roofline_multiply(kind, ROUNDS, threads, self._cpus.ctypes.data)
            best = min(best, time.perf_counter() - begin)
        return operations * threads / float(best)

    def describe(self, kind: ProductKind) -> str:
        """Return the name of the CPU instructions that compute products of ``kind`` at this level."""
        name: bytes = self._library.pds_roofline_kind(kind)
        return name.decode()
