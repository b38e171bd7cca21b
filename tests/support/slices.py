"""Checksums of slices, computed without the machinery under test."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import xxhash

from pdserve.messages.worker import SliceChecksum


def checksum_of(data: bytes, algorithm: str) -> int:
    """See ``SliceChecksum``."""
    if algorithm == "xxh3":
        return xxhash.xxh3_64_intdigest(data)
    words = np.frombuffer(data, dtype=np.uint64)
    places = np.arange(1, len(words) + 1, dtype=np.uint64)
    z = words + places * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))


def summed_up(
    pool: np.ndarray, pages, *bounds: int, num_layers: int = 1, algorithm: Literal["xxh3", "words"] = "xxh3"
) -> list[SliceChecksum]:
    """Return one slice of whole pages between each two of ``bounds``, or one for all pages. ``pool``: [P, bytes]."""
    parts = [(a, b, pool[np.asarray(pages)[a:b]].tobytes()) for a, b in pairwise(bounds or (0, len(pages)))]
    return [SliceChecksum(a, b - a, 0, num_layers, checksum_of(part, algorithm), 0, algorithm) for a, b, part in parts]


def assert_summed_up(pool: np.ndarray, pages, slices: list[SliceChecksum], num_layers: int = 1) -> None:
    """Assert that every layer of every page is in one slice, each with its checksum."""
    parts = pool[np.asarray(pages)].reshape(len(pages), num_layers, -1)
    counts = np.zeros(parts.shape[:2], int)
    for piece in slices:
        part = slice(piece.first, piece.first + piece.count), slice(piece.begin, piece.end)
        counts[part] += 1
        assert checksum_of(parts[part].tobytes(), piece.algorithm) == piece.checksum, piece
    assert (counts == 1).all(), counts
