"""Runs before the unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def _known_sources() -> Iterator[None]:
    """Read the product's sources once to name packed weights: a process of the product loads one model, this one many.

    It reads two hundred files each time, which takes longer than to pack a tiny model.
    """
    request = sys.modules.get("pdserve.model_runner.weights_cache.request")
    with pytest.MonkeyPatch.context() as patch:
        if request is not None:
            patch.setattr(request, "code_digest", cache(request.code_digest))
            patch.setattr(request, "library_path", cache(request.library_path))
        yield
