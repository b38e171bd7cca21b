"""Number of answers that a body asks for. The client writes it, so nothing in it is trusted."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..runtime.web.body import MAX_PROMPTS
from .work import MAX_ANSWERS

ABSENT = msgspec.Raw(b"")


class _Choices(msgspec.Struct):
    """An object with the number of answers to a prompt."""

    n: msgspec.Raw = ABSENT
    """The number. Instances refuse a ``best_of`` above it."""


def count_answers(prompts: int, values: Iterable[msgspec.Raw]) -> int:
    """Return the number of answers to ``prompts`` prompts, at most ``MAX_ANSWERS``.

    ``values``: JSON of the fields that say how many each prompt gets (``PathFacts.choice_fields``). The largest counts.
    What an instance refuses counts as one answer to a prompt, or as too many.
    """
    return min(MAX_ANSWERS, max((_answers(prompts, value) for value in values), default=prompts))


def _answers(prompts: int, value: msgspec.Raw) -> int:
    """Return the number of answers by one field: a number, an object with one, or a list of an object for each prompt.

    Such a list is decoded only if it is short.
    """
    kind = bytes(memoryview(value)[:1])
    try:
        if kind == b"{":
            return prompts * _number(msgspec.json.decode(value, type=_Choices).n)
        if kind != b"[":
            return prompts * _number(value)
        if bytes(value).count(b"{") > MAX_PROMPTS:
            return MAX_ANSWERS
        return max(prompts, sum(_number(one.n) for one in msgspec.json.decode(value, type=list[_Choices])))
    except (msgspec.DecodeError, RecursionError):  # not these objects, or nested too deeply
        return prompts


def _number(value: msgspec.Raw) -> int:
    """Return a JSON number as an integer from 1 to ``MAX_ANSWERS``; 1 for anything else."""
    # Reading all digits as a float takes 60 ms for 32 MiB, and bodies of that size are parsed on a thread.
    if not bytes(memoryview(value)[:1]).isdigit():
        return 1
    return int(min(max(float(bytes(value)), 1.0), MAX_ANSWERS))
