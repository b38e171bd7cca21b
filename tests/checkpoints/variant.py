"""What a campaign compares: a base with changed statements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .checkpoint import Change, both

Axes = Mapping[str, Mapping[str, Change]]
"""Changes by axis and label."""
MODEL, TEXT, SAMPLING, GGUF_TEXT = "model", "text", "sampling", "text of a GGUF"


class Variant(NamedTuple):
    """A changed base. ``side``: what is compared, greedy tokens (``MODEL``), token ids of texts
    (``TEXT``) or sampling defaults (``SAMPLING``).

    ``lengths``: lengths of the prompts, in tokens. ``context``: the ``--context-length``, or None. ``refusal``: what
    the message of the refusal must contain; None: a refusal is not required. ``reference``: the change of the base that
    transformers reads instead, of a format that it can't read here.
    """

    name: str
    base: str
    change: Change
    side: str = MODEL
    lengths: tuple[int, ...] = (9, 90)
    context: int | None = None
    refusal: str | None = None
    reference: Change | None = None


def from_rows(
    base: str, title: str, axes: Axes, rows: Iterable[Mapping[str, str]], side: str = MODEL
) -> Iterator[Variant]:
    """Yield the variant of each row: a label for each axis."""
    for row in rows:
        labels = ", ".join(f"{axis} {label}" for axis, label in row.items())
        yield Variant(
            f"{base}, {title}: {labels}", base, both(*(axes[axis][label] for axis, label in row.items())), side
        )
