"""Rows that have every pair of values of two axes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence

Value = tuple[str, str]
"""An axis and one of its labels."""


def all_pairs(axes: Mapping[str, Iterable[str]], seed: int) -> list[dict[str, str]]:
    """Return rows, a label for each axis, in which every pair of labels of two axes occurs.

    Each row takes the pair that waits longest, and then for each other axis the label with the most missing pairs.
    """
    draw = random.Random(seed)
    labels = {axis: list(values) for axis, values in axes.items()}
    missing: dict[frozenset[Value], None] = {}
    for one, other in itertools.combinations(labels, 2):
        missing |= {frozenset({(one, a), (other, b)}): None for a in labels[one] for b in labels[other]}
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        rest = [axis for axis in labels if axis not in row]
        draw.shuffle(rest)
        for axis in rest:
            row[axis] = _best(axis, labels[axis], row, missing, draw)
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({axis: row[axis] for axis in labels})
    return rows


def _best(
    axis: str,
    labels: Sequence[str],
    row: Mapping[str, str],
    missing: Mapping[frozenset[Value], None],
    draw: random.Random,
) -> str:
    def gain(label: str) -> tuple[int, float]:
        return sum(frozenset({(axis, label), other}) in missing for other in row.items()), draw.random()

    return max(labels, key=gain)
