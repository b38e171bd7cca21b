"""``pdserve bench cache``: it measures, its orders are checked, and its hit rates are those of the trace."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from pdserve.benchmark.cache.hit_rates import hit_rate, make_jobs, table, totals
from pdserve.benchmark.cache.options import CacheBenchOptions
from pdserve.benchmark.cache.run import run_cache_bench
from pdserve.benchmark.cache.waiting_order import measure_queue
from pdserve.benchmark.errors import BenchError, BenchOptionsError
from pdserve.benchmark.schedule.options import ScheduleBenchOptions
from pdserve.benchmark.schedule.run import run_schedule_bench
from pdserve.benchmark.schedule.virtual_instance import Job
from pdserve.scheduler.policies.by_prefix import LongestPrefixMatch

SMALL = {
    "cached_tokens": 20_000,
    "prompt_tokens": 1024,
    "path_nodes": 8,
    "queued": 300,
    "decoding": 16,
    "evicted_tokens": 1600,
    "rounds": 1,
}


def test_every_part_is_measured(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run_cache_bench(CacheBenchOptions(**SMALL, output_json=out)) == 0
    printed = capsys.readouterr().out
    for words in ("match 1,024 tokens, 8 nodes", "evict 1,600 tokens", "300 requests wait", "brute force"):
        assert words in printed
    results = json.loads(out.read_text())
    assert {name: min(times) > 0 for name, times in results["pdserve"].items()} == dict.fromkeys(
        ("match", "insert", "store", "decode", "evict"), True
    )
    assert results["queue"]["losses"] >= 0
    assert len(results["queue"]["step"]) > 10


def test_a_contestant_that_fails_is_named(tmp_path, capsys):
    liar = tmp_path / "python"
    liar.write_text("#!/bin/sh\necho no vllm here >&2\nexit 3\n")
    liar.chmod(0o700)
    assert run_cache_bench(CacheBenchOptions(**SMALL, vllm_python=liar)) == 1
    assert "no vllm here" in capsys.readouterr().err


def test_an_order_that_is_not_true_is_noticed(monkeypatch):
    order = LongestPrefixMatch.order
    monkeypatch.setattr(LongestPrefixMatch, "order", lambda self, lane: iter(list(order(self, lane))[::-1]))
    with pytest.raises(BenchError, match="not that of brute force"):
        measure_queue(CacheBenchOptions(**SMALL))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"path_nodes": 63}, "--path-nodes"),
        ({"evicted_tokens": 600_000}, "--evicted-tokens"),
        ({"pool_share": [0.0]}, "--pool-share"),
        ({"plot": "x.png"}, "--plot"),
        ({"rounds": 0}, "--rounds"),
    ],
)
def test_options_that_cant_work_are_refused_by_name(fields, named):
    with pytest.raises(BenchOptionsError, match=named):
        CacheBenchOptions(**fields).check()


def write_trace(path, lines):
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def entry(at, blocks, output=64):
    return {"timestamp": at, "input_length": 512 * len(blocks), "output_length": output, "hash_ids": blocks}


def test_hit_rates_of_a_loop_by_policy(tmp_path, capsys):
    """Six conversations in a circle, on a pool for half of them: lru never finds one again, mru keeps some."""
    trace, plot, out = tmp_path / "trace.jsonl", tmp_path / "plot.png", tmp_path / "out.json"
    rounds = [entry(1e5 * (6 * r + c), [0, *range(100 * c + 1, 100 * c + 20)], 1) for r in range(5) for c in range(6)]
    write_trace(trace, rounds)
    options = CacheBenchOptions(trace=trace, policies=["lru", "mru"], pool_share=[0.5, 2.0], plot=plot, output_json=out)
    assert run_cache_bench(options) == 0
    rates = {(r["policy"], r["share"]): r["rate"] for r in json.loads(out.read_text())}
    bound = totals(make_jobs(options), 16).bound
    assert rates["lru", 0.5] < 0.1 < rates["mru", 0.5] < bound
    assert rates["lru", 2.0] == rates["mru", 2.0] == pytest.approx(bound)
    assert f"{bound:.3f}" in capsys.readouterr().out
    assert plot.stat().st_size > 1000


def test_the_bound_is_what_a_search_of_all_earlier_prompts_finds():
    rng = np.random.default_rng(0)
    jobs = [Job(f"r{i}", 0.0, rng.integers(0, 2, rng.integers(1, 40)).astype(np.int32), 1, 1) for i in range(80)]
    hits = 0
    for i, job in enumerate(jobs):
        most = (len(job.prompt) - 1) // 2 * 2
        known = [
            n for n in range(0, most + 1, 2) if any(j.prompt[:n].tolist() == job.prompt[:n].tolist() for j in jobs[:i])
        ]
        hits += max(known, default=0)
    found = totals(jobs, 2)
    assert found.bound == hits / sum(len(job.prompt) for job in jobs)
    different = {tuple(j.prompt[:n].tolist()) for j in jobs for n in range(2, len(j.prompt) + 1, 2)}
    assert found.different_tokens == 2 * len(different)


def test_requests_that_dont_fit_the_pool_are_left_out():
    jobs = [Job(f"r{i}", float(i), np.arange(n, dtype=np.int32), 1, 1) for i, n in enumerate((30, 200, 30))]
    rate = hit_rate(CacheBenchOptions(), "lru", 0.5, jobs, 128)
    assert (rate.pool_tokens, rate.requests) == (64, 2)
    assert rate.rate == pytest.approx(16 / 60)
    assert "| 50% | 64 | 0.267 | 0.900 |" in table([rate], 0.9)


def test_a_pool_that_no_request_fits_is_named(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [entry(0, list(range(8)))])
    assert run_cache_bench(CacheBenchOptions(trace=trace, pool_share=[0.001])) == 1
    assert "no request fits a pool of" in capsys.readouterr().err
    assert run_schedule_bench(ScheduleBenchOptions(trace=trace, pool_tokens=256)) == 1
    assert "use more --pool-tokens" in capsys.readouterr().err


def test_each_rule_of_admission_is_the_one_that_the_scheduler_follows(tmp_path):
    """All outputs are short. A forecast learns that; the ratio keeps a share of what may be generated."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    write_trace(trace, [entry(i, [i]) for i in range(40)])
    options = ScheduleBenchOptions(
        trace=trace, pool_tokens=1024, policies=["fcfs"], admission=["forecast", "ratio"], output_json=out
    )
    assert run_schedule_bench(options) == 0
    forecast, ratio = json.loads(out.read_text())
    assert forecast["seconds"] < ratio["seconds"]
