"""Sampling of a test's parameters for ``make test``: ``@pytest.mark.sample(n)`` runs one combination in ``n``.

The others are slow tests. Combinations are numbered along every parameter. Those with numbers that add up to a multiple
of ``n`` are in the sample. So neighbours along any parameter are in it by turns, and every value is in it, which is
checked. With two parameters more, every pair of values is in it as well.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

ParameterSet = type(pytest.param())


def is_in_sample(item: pytest.Item) -> bool:
    """Return whether ``make test`` runs ``item``, as far as sampling goes.

    Raises ``UsageError`` if values would be left out.
    """
    mark = item.get_closest_marker("sample")
    if mark is None or not isinstance(item, pytest.Function):
        return True
    [one_in] = mark.args
    axes = [axis.args for axis in item.iter_markers("parametrize")]
    steps = [len(values) - 1 for _, values in axes]
    if any(sum(steps) - own < one_in - 1 for own in steps):
        raise pytest.UsageError(f"{item.nodeid}: one in {one_in} leaves out values; sample more")
    return sum(place(names, values, item.callspec.params) for names, values in axes) % one_in == 0


def few(names: Iterable[str], most: int = 4) -> list[Any]:
    """Return ``names`` as values of ``parametrize``; of those that begin with "random", all but ``most`` are slow."""
    values: list[Any] = []
    drawn = 0
    for name in names:
        drawn += name.startswith("random")
        values.append(
            pytest.param(name, marks=pytest.mark.slow) if name.startswith("random") and drawn > most else name
        )
    return values


def place(names: str | Sequence[str], values: Collection[Any], params: Mapping[str, Any]) -> int:
    """Return the index of the test's value in the ``values`` of one ``parametrize``."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    own = [params[name] for name in names]
    for i, value in enumerate(values):
        several = value.values if isinstance(value, ParameterSet) else value if len(names) > 1 else (value,)
        if all(map(operator.is_, several, own)):
            return i
    raise AssertionError(f"{own} is not among the values of {names}")
