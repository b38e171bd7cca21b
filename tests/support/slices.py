"""Checksums of slices, computed without the machinery under test."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import xxhash

from pdserve.messages.worker import SliceChecksum


def summed_up(pool: np.ndarray, pages, *bounds: int, num_layers: int = 1) -> list[SliceChecksum]:
    """One slice of whole pages between each two of ``bounds``; all in one without. ``pool``: [P, bytes]."""
    return [
        SliceChecksum(a, b - a, 0, num_layers, xxhash.xxh3_64_intdigest(pool[np.asarray(pages)[a:b]].tobytes()))
        for a, b in pairwise(bounds or (0, len(pages)))
    ]


def assert_summed_up(pool: np.ndarray, pages, slices: list[SliceChecksum], num_layers: int = 1) -> None:
    """Every layer of every page is in one slice, each with its checksum."""
    parts = pool[np.asarray(pages)].reshape(len(pages), num_layers, -1)
    counts = np.zeros(parts.shape[:2], int)
    for piece in slices:
        part = slice(piece.first, piece.first + piece.count), slice(piece.begin, piece.end)
        counts[part] += 1
        assert xxhash.xxh3_64_intdigest(parts[part].tobytes()) == piece.checksum, piece
    assert (counts == 1).all(), counts
