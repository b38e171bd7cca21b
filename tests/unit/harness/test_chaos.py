"""The campaign's judge must be able to say no, and a seed must stand for one list of faults."""

from __future__ import annotations

import pytest
from chaos.expected import Question
from chaos.faults import LINKS, Fault, Kind, deck, drawn
from chaos.judge import REQUEST_SECONDS, STALL_SECONDS, Episode, Verdict, judge
from chaos.load import Answer
from chaos.options import Options
from chaos.table import BEGIN, END, rendered, write

QUESTION = Question([1, 2], [10, 11, 12, 13])
FAULT = Fault(Kind.KILL, "decode1", "worker")
EPISODE = Episode(FAULT, struck=100.0, back=105.0, serving=106.0)


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch):
    """The judge takes its limits as they are written."""
    monkeypatch.setattr("chaos.judge.stretched", float)


def answer(**changes) -> Answer:
    """Make a correct answer of two events, with ``changes``."""
    good = {
        "question": QUESTION,
        "wanted": 4,
        "streaming": True,
        "asked": 99.0,
        "tokens": [10, 11, 12, 13],
        "event_times": [99.5, 100.5],
        "status": 200,
        "reason": "length",
        "done": True,
        "end": 100.5,
    }
    return Answer(**(good | changes))


def failed(**changes) -> Answer:
    return answer(**({"tokens": [], "reason": "", "error": "sorry", "status": 503, "done": False} | changes))


def test_good_answers_and_excused_errors_pass():
    cut = failed(status=200, tokens=[10, 11])
    verdict = judge(EPISODE, [answer(), answer(wanted=2, tokens=[10, 11]), failed(), cut])
    assert verdict.good
    assert (verdict.requests, verdict.finished, verdict.errors) == (4, 2, {"503": 1, "stream": 1})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": [10, 11, 99, 13]}, "the first 2 are right"),
        ({"tokens": [10, 11, 12]}, "3 of 4 tokens"),
        ({"wanted": 3}, "4 of 3 tokens"),
        ({"reason": "stop"}, "finished by 'stop'"),
        ({"reason": "abort", "tokens": [10]}, "without a request for that"),
        ({"done": False}, "without a word"),
    ],
)
def test_what_no_fault_excuses_is_wrong(changes, why):
    verdict = judge(EPISODE, [answer(**changes)])
    assert verdict.wrong >= 1
    assert any(why in note for note in verdict.notes), verdict.notes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"status": 500}, "this status"),
        ({"status": None, "broken": True}, "to the router broke"),
        ({"asked": 107.0, "end": 107.5}, "served again"),
        ({"asked": 98.0, "end": 99.0}, "before the fault"),
        ({"status": 200, "tokens": [10, 99]}, "the first 1 are right"),
    ],
)
def test_errors_that_should_not_be_are_wrong(changes, why):
    verdict = judge(EPISODE, [failed(**changes)])
    assert verdict.wrong == 1
    assert why in verdict.notes[0]


def test_late_and_stalled_requests_are_reported():
    assert judge(EPISODE, [answer(end=100.0 + REQUEST_SECONDS + 1, event_times=[])]).late >= 1
    stalled = answer(asked=104.9, event_times=[105.5, 105.6 + STALL_SECONDS], end=105.7 + STALL_SECONDS)
    assert judge(EPISODE, [stalled]).late == 1
    before_they_were_back = answer(asked=99.0, event_times=[105.5], end=106.0)
    assert judge(EPISODE, [before_they_were_back]).late == 0


def test_a_seed_stands_for_one_list_that_has_every_kind():
    rows = len(deck())
    assert drawn(3, 50) == drawn(3, 50) != drawn(4, 50)
    assert len({fault.row for fault in drawn(3, rows)}) == rows
    assert not {fault.kind for fault in drawn(3, 50, LINKS)} & LINKS


def test_options_are_checked():
    made = Options.of({"PDSERVE_CHAOS_BACKENDS": "tcp,shm", "PDSERVE_CHAOS_SEED": "5", "PDSERVE_CHAOS_FAULTS": "7"})
    assert made == Options(("tcp", "shm"), 5, 7)
    for name, value in (("BACKENDS", "carrier pigeon"), ("BACKENDS", ""), ("SEED", "x"), ("FAULTS", "-1")):
        with pytest.raises(SystemExit, match=f"PDSERVE_CHAOS_{name}"):
            Options.of({f"PDSERVE_CHAOS_{name}": value})


def test_the_table_stands_between_the_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    made = [Verdict(FAULT.row, str(FAULT), 10, 8, errors={"503": 2}, recovery=1.25, slowest_error=0.5)] * 2
    write(rendered({"tcp": made}, {"tcp": "A remark."}, ["a fact"]), page)
    text = page.read_text()
    assert text.startswith(f"above\n{BEGIN}\n\n- a fact\n")
    assert text.endswith(f"A remark.\n\n{END}\nbelow\n")
    assert "| kill -9: worker | 2 | 20 | 16 | 0 | 4 503 | 0 | 0 | 0 | 0 | 0.5 | 1.2 |" in text
    assert "old" not in text
