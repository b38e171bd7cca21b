"""The command ``pdserve bench transfer`` with real processes, and what becomes of those that fail."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from support.import_path import with_inherited
from support.libraries import is_missing
from support.processes import freeze

from pdserve.benchmark.errors import BenchOptionsError
from pdserve.benchmark.transfer.cases import cases_of, pages_of
from pdserve.benchmark.transfer.contestant import Contestant
from pdserve.benchmark.transfer.messages import MEMCPY, Begin, How, Move, Moved, Role, Way
from pdserve.benchmark.transfer.options import TransferBenchOptions
from pdserve.benchmark.transfer.pools import SharedPools
from pdserve.benchmark.transfer.process import SideError, SideProcess
from pdserve.benchmark.transfer.results import CaseResult, Round
from pdserve.mem_cache.kv_pages.page_group import neighbour_spans
from pdserve.server.cli import app

PAGE = 4096
SMALL = ("--page-bytes", str(PAGE), "--request-mib", "0.0625", "--seconds", "0")


def bench(*argv: str, rounds: int = 1) -> int:
    return app(["bench", "transfer", *SMALL, "--rounds", str(rounds), *argv], result_action="return_value")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backends": []}, "--backends takes one value or more"),
        ({"backends": ["tcp", "tcp"]}, "each of them once"),
        ({"page_bytes": [65536, 32]}, "--page-bytes must be 64 or more"),
        ({"request_mib": [float("inf")]}, "--request-mib"),
        ({"rounds": 0}, "--rounds"),
        ({"seconds": float("nan")}, "--seconds"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, says):
    TransferBenchOptions().check()
    with pytest.raises(BenchOptionsError, match=says):
        TransferBenchOptions(**changes).check()


def test_a_bad_command_line_starts_nothing(capsys):
    assert bench("--contiguity", "scattered", "scattered") == 2
    assert "pdserve bench transfer: --contiguity takes" in capsys.readouterr().err


def test_scattered_pages_have_no_neighbours_and_no_page_twice():
    options = TransferBenchOptions(request_mib=[0.008, 4.0])
    few, _, many, adjacent = cases_of(options, PAGE)
    for case in (few, many):
        pages = pages_of(case, case.num_pages + 1)
        assert len(neighbour_spans(*pages, PAGE)[0]) == case.num_pages
        assert all(sorted(side) == list(range(1, case.num_pages + 1)) for side in pages)
    assert few.num_pages == 2
    assert len(neighbour_spans(*pages_of(adjacent, adjacent.num_pages + 1), PAGE)[0]) == 1


def test_figures_are_medians_and_ratios_are_taken_within_a_round():
    case = cases_of(TransferBenchOptions(request_mib=[1024.0]), 65536)[0]
    nixl, raw = Way(How.ENGINE, "nixl"), Way(How.RAW, "nixl")
    rounds = {
        MEMCPY: [Round(1.0, verify=0.5), Round(2.0, verify=0.5), Round(9.0, verify=0.5)],
        nixl: [Round(2.0, 1.5, 0.25), Round(8.0, 7.0, 0.25), Round(10.0, 9.8, 0.25)],
        raw: [Round(1.0), Round(2.0), Round(1.0)],
    }
    result = CaseResult(case, rounds)
    gib = (1 << 30) / 1e9
    assert result.figures(nixl) == pytest.approx((gib / 8, 0.5, 0.25, gib / 7, 500.0, 4 * gib))
    assert result.figures(raw) == (gib, 1.0, None, None, None, None)
    assert result.figures(MEMCPY) == (gib / 2, None, None, None, 500.0, 2 * gib)
    del rounds[raw]
    assert result.figures(nixl).of_raw is None


def test_a_run_leaves_a_table_and_a_file(tmp_path, capfd):
    path = tmp_path / "out/r.json"
    assert bench("--backends", "tcp", "shm", "--output-json", str(path), rounds=2) == 0
    shown = capfd.readouterr().out
    for words in ("pages of 4,096 bytes", "16 scattered", "16 adjacent", "memcpy", "tcp", "shm", "verify GB/s"):
        assert words in shown
    content = json.loads(path.read_text())
    assert [(c["contiguity"], c["nbytes"]) for c in content["cases"]] == [("scattered", 65536), ("adjacent", 65536)]
    for case in content["cases"]:
        assert list(case["moved_by"]) == ["memcpy", "tcp", "shm"]
        for name, found in case["moved_by"].items():
            assert len(found["rounds"]) == 2
            assert found["rate"] > 0
            assert found["verify_rate"] > 0
            assert (found["of_memcpy"] is None) == (name == "memcpy")
            assert (found["unhashed_rate"] is None) == (name == "memcpy")
    assert (content["left_out"], content["failed"]) == ({}, {})


# Above, a backend without a library is measured in the same way.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_library_is_measured_beside_itself(name, tmp_path):
    if is_missing(name):
        pytest.skip(f"{name} is not installed here")
    path = tmp_path / "r.json"
    assert bench("--backends", name, "--contiguity", "scattered", "--output-json", str(path)) == 0
    moved_by = json.loads(path.read_text())["cases"][0]["moved_by"]
    assert list(moved_by) == ["memcpy", name, f"raw {name}"]
    assert moved_by[name]["of_raw"] > 0


def test_a_backend_that_is_not_installed_is_named_and_left_out(tmp_path, monkeypatch, capfd):
    package = tmp_path / "nixl_cu12"
    package.mkdir()
    package.joinpath("__init__.py").write_text("raise ImportError('nothing here')\n")
    monkeypatch.setenv("PYTHONPATH", with_inherited(tmp_path))
    assert bench("--backends", "shm", "nixl", "--contiguity", "adjacent") == 0
    shown = capfd.readouterr().out
    assert "left out: nixl:" in shown
    assert "pip install 'pdserve[nixl]'" in shown
    assert "shm" in shown


@pytest.fixture
def pools():
    with SharedPools(PAGE, 17) as made:
        yield made


def begin():
    return Begin(How.MEMCPY, "", Role.WRITER, PAGE, 17)


def test_a_process_that_hangs_is_named_and_killed(pools):
    with SideProcess("the writer of x", pools, limit_seconds=0.2) as side:
        freeze(side.process.pid)
        with pytest.raises(SideError, match=r"the writer of x hangs: no answer to Begin within 0\.2 s"):
            side.ask(begin())
    assert side.process.returncode == -signal.SIGKILL


def test_a_process_that_dies_is_named(pools):
    with SideProcess("the writer of x", pools) as side:
        side.ask(begin())
        side.process.kill()
        with pytest.raises(SideError, match="the writer of x ended with -9 instead of an answer to Move"):
            side.ask(Move(b"", b"", 0.0, True))


def test_what_fails_in_a_process_is_reported(pools):
    with SideProcess("the writer of x", pools) as side, pytest.raises(SideError, match="Move: it has not begun"):
        side.ask(Move(b"", b"", 0.0, True))


def test_bytes_that_did_not_land_are_noticed(pools, monkeypatch):
    case = cases_of(TransferBenchOptions(request_mib=[0.0625]), PAGE)[0]
    pages = pages_of(case, 17)
    with Contestant(MEMCPY, pools) as contestant:
        contestant.prepare(pages)
        assert pools.has_landed(pages)
        monkeypatch.setattr(pools, "clear", lambda: None)
        monkeypatch.setattr(contestant, "_move", lambda *args, **kwargs: Moved([]))
        moved = pages._replace(dst=np.roll(pages.dst, 1))
        with pytest.raises(SideError, match="memcpy left other bytes"):
            contestant.prepare(moved)


def test_a_contestant_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch, capfd):
    measure = Contestant.measure

    def failing(self, seconds):
        if self.way.backend == "tcp":
            raise SideError("the writer of tcp [1] fell over")
        return measure(self, seconds)

    monkeypatch.setattr(Contestant, "measure", failing)
    path = tmp_path / "r.json"
    assert bench("--backends", "tcp", "shm", "--contiguity", "adjacent", "--output-json", str(path)) == 1
    assert "failed: tcp: the writer of tcp [1] fell over" in capfd.readouterr().out
    content = json.loads(path.read_text())
    assert [list(case["moved_by"]) for case in content["cases"]] == [["memcpy", "shm"]]
