"""Sampling parameters, as they travel from HTTP to the model worker."""

from __future__ import annotations

from typing import Annotated, NamedTuple, get_type_hints

import msgspec

from .base import MAX_TOKENS
from .grammar import Grammar

MAX_SEED = (1 << 63) - 1
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
"""Maximum of the repetition penalty, and of the absolute value of frequency and presence penalties."""
MIN_REPETITION_PENALTY = 0.01
"""Minimum of the repetition penalty. A logit divided by less may overflow, which looks like a broken model."""
MAX_BIAS = 100.0
"""Maximum absolute value of a token's logit bias."""
MAX_STOPS = 32
"""Maximum number of stop strings."""
MAX_STOP_CHARS = 1024


class Column(NamedTuple):
    """Column of the row table (``model_runner/sampling/row_params.py``) that holds a sampling parameter."""

    dtype: str
    """NumPy type in the table."""
    least: float
    """Minimum of the values that another instance may send."""
    most: float
    """Maximum of the values that another instance may send."""


class OutputMarks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the detokenizer needs to know of the format of an answer."""

    shown: tuple[str, ...] = ()
    """Special tokens that are shown as text. Others are left out."""
    reasoning: tuple[str, str] = ("", "")
    """Text that begins and ends the reasoning before an answer; empty: there is none."""


def begins_open(begin: str, prompt_tail: str) -> bool:
    """Return whether a prompt ends within reasoning that ``begin`` opens; False if ``begin`` is empty.

    ``prompt_tail``: the last text of the prompt.
    """
    return bool(begin) and prompt_tail.rstrip().endswith(begin.strip())


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen.

    ``temperature`` 0 means greedy; ``top_k`` -1 means the whole vocabulary. ``seed`` is always set by the HTTP
    process (drawn when the client gave none), so a request can be replayed on any instance. HTTP expands ``n`` into
    one request a choice before this struct is made.

    The row table has the fields with a ``Column``, in this order.
    """

    seed: Annotated[int, Column("uint64", 0, MAX_SEED)]
    max_new_tokens: int = 128
    min_new_tokens: Annotated[int, Column("int64", 0, MAX_TOKENS)] = 0
    temperature: Annotated[float, Column("float32", 0, MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Column("float64", 0, 1)] = 1.0
    top_k: Annotated[int, Column("int64", -1, MAX_TOKENS)] = -1
    min_p: Annotated[float, Column("float32", 0, 1)] = 0.0
    frequency_penalty: Annotated[float, Column("float32", -MAX_PENALTY, MAX_PENALTY)] = 0.0
    presence_penalty: Annotated[float, Column("float32", -MAX_PENALTY, MAX_PENALTY)] = 0.0
    repetition_penalty: Annotated[float, Column("float32", MIN_REPETITION_PENALTY, MAX_PENALTY)] = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = {}
    """Token id → what is added to its logit."""
    marks: OutputMarks | None = None
    """Format of the answer; None: plain text."""
    grammar: Grammar | None = None
    """What the output must match; None: anything."""

    @property
    def has_penalties(self) -> bool:
        """Return whether a penalty is set, so that the sampler needs the request's token history."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


def _columns() -> dict[str, Column]:
    """Return the ``Column`` (type in the row table and limits) of each field that has one, by the field's name."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    return {
        name: mark
        for name in SamplingParams.__struct_fields__
        for mark in getattr(hints[name], "__metadata__", ())
        if isinstance(mark, Column)
    }


COLUMNS = _columns()
"""Columns of the row table that come from ``SamplingParams``, by the field's name."""
