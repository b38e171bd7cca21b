"""Runs before the unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

import pytest

from pdserve.model_runner.device.placement import CROWDED_SPIN_US, SPIN_US


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


@pytest.fixture(scope="session", autouse=True)
def _known_endpoints() -> Iterator[None]:
    """Find the installed version and the endpoints once: a process makes one application, these tests thousands."""
    app = sys.modules.get("pdserve.server.http.app")
    with pytest.MonkeyPatch.context() as patch:
        if app is not None:
            patch.setattr(app, "version", cache(app.version))
            patch.setattr(app, "load_endpoint", cache(app.load_endpoint))
        yield


@pytest.fixture(scope="session", autouse=True)
def _sleeping_teams() -> Iterator[None]:
    """Let compute threads sleep at barriers at once, as they do if they outnumber the cores.

    Test files run side by side. A thread that spins takes the core that the awaited one needs.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (("cpu_engine.team", "Team"), ("engines.load_setup", "Threads")):
            if (found := sys.modules.get(f"pdserve.model_runner.{module}")) is not None:
                init = getattr(found, name).__init__
                defaults = tuple(CROWDED_SPIN_US if value == SPIN_US else value for value in init.__defaults__)
                patch.setattr(init, "__defaults__", defaults)
        yield
