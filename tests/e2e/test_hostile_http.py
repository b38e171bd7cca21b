"""Ten thousand cases of hostile HTTP against real servers (``make test-hostile``); a sample is in ``make test``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.hostile_http import HostileClient, good_requests
from support.machine import limit
from support.processes import Pair, pd_pair

CASES = 5_000
"""At each server."""
KNOWN = {100, 200, 204, 400, 401, 403, 404, 405, 413, 431, 503}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_args: list[str]) -> Iterator[Pair]:
    with pd_pair(tmp_path_factory.mktemp("pair"), "shm", *tiny_args) as pair:
        yield pair
        pair.assert_all_returned()


@pytest.mark.parametrize("front", ["router", "decode"])
def test_after_anything_the_next_good_request_is_served(
    pair: Pair, front: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = getattr(pair, front)
    hostile = HostileClient(server.port, seed=2026, seconds=limit(30.0))
    with good_requests(server.port, limit(30.0)) as ask:
        hostile.run(CASES, ask)
    with capsys.disabled():
        print(f"\n{front}: {dict(hostile.cases)}\nstatuses {dict(hostile.statuses)}")
    assert hostile.statuses.keys() <= KNOWN
    for one in (pair.prefill, pair.decode, pair.router):
        assert one.is_healthy()
        assert not re.search(r"Traceback|Exception in ASGI", one.log())
