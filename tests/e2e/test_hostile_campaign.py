"""A short campaign of each hostile attacker against one real cluster. ``make hostile-campaign`` plays long ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostile.campaign import ATTACKERS, attacked
from hostile.cluster import Cluster, cluster

SECONDS = 15.0
SEED = 2026

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hostile"), "tcp") as found:
        yield found


@pytest.mark.parametrize("who", sorted(ATTACKERS))
def test_an_attacker_breaks_and_learns_nothing(target: Cluster, who: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = attacked(ATTACKERS[who], target, SEED, SECONDS)
    with capsys.disabled():
        print(f"\n{who}: {report}")
    assert not report.problems
    assert sum(report.record.kinds.values()) > 20
    assert report.neighbour.statuses[200] > 0
