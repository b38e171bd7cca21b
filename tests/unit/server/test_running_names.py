"""Names of ended requests are kept for a while: of few submissions, and of few choices."""

from __future__ import annotations

import pytest

from pdserve.runtime.web.keys import ANYBODY
from pdserve.server.http.engine.running_names import MAX_ENDED, MAX_ENDED_CHOICES, RunningNames
from pdserve.server.http.engine.submission import Choice


def end(names: RunningNames, rid: str, *, choices: int) -> None:
    """Add and remove a submission with this many choices: ``rid`` names all of them, ``rid-0`` the first."""
    made = [Choice(i, i, f"{rid}-{i}", f"wire-{rid}-{i}", 0.0) for i in range(choices)]
    named = {rid: made, **{choice.rid: [choice] for choice in made}}
    names.add(ANYBODY.name, named)
    names.remove(ANYBODY.name, named)


@pytest.mark.parametrize(("choices", "kept"), [(1, MAX_ENDED), (64, MAX_ENDED_CHOICES // 64), (4096, 1), (5000, 1)])
def test_ended_submissions_are_forgotten_before_they_fill_memory(choices: int, kept: int) -> None:
    names = RunningNames()
    for i in range(kept + 3):
        end(names, f"r{i}", choices=choices)
    assert [i for i in range(kept + 3) if names.find_ended(ANYBODY, f"r{i}")] == list(range(3, kept + 3))
    assert len(names.find_ended(ANYBODY, f"r{kept + 2}")) == choices
    assert names.find_ended(ANYBODY, "r2-0") == []
    assert names.find_ended(ANYBODY, "r3-0") == ["wire-r3-0"]
    assert len(names._ended_by_wire_rid) == kept * choices


def test_a_batch_does_not_hide_names_for_longer_than_it_is_kept() -> None:
    names = RunningNames()
    end(names, "batch", choices=MAX_ENDED_CHOICES)
    end(names, "one", choices=1)
    assert names.find_ended(ANYBODY, "batch") == []
    end(names, "two", choices=1)
    assert names.find_ended(ANYBODY, "one") == ["wire-one-0"]
