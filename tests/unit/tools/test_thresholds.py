"""``python -P -m tools.thresholds``: its contestants, their loads, and what is told of the rounds."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.benchmark.errors import BenchOptionsError
from pdserve.benchmark.scenario import read_scenario
from pdserve.server.cli import app
from tools.peers.layout import PeerSetup
from tools.thresholds.__main__ import show
from tools.thresholds.clusters import CLUSTERS, make_cluster
from tools.thresholds.loads import LOADS, bench_options
from tools.thresholds.options import ThresholdOptions
from tools.thresholds.run import Outcome


@pytest.mark.parametrize("contestant", [*CLUSTERS, "256", "other"])
def test_each_contestant_is_a_command_that_up_takes(contestant, tmp_path):
    cluster = make_cluster(contestant, Path("/opt/other/bin/python"), "smollm2", "bfloat16")
    [launch] = cluster.launches(PeerSetup(tmp_path, (0, 1)), [4711])
    assert launch.argv[0] == ("/opt/other/bin/python" if contestant == "other" else sys.executable)
    _, bound, _ = app.parse_args(launch.argv[launch.argv.index("up") :], exit_on_error=False, print_error=False)
    options = bound.arguments["options"]
    instances = (options.prefill, options.decode, options.unified)
    assert instances == {"unified-2": (0, 0, 2), "unified-1": (0, 0, 1)}.get(contestant, (1, 1, 0))
    threshold = {"always": "always", "never": "never", "256": "256"}.get(contestant, "auto")
    assert (options.disaggregation_threshold, options.cpus, options.port) == (threshold, "0,1", 4711)


@pytest.mark.parametrize("load", LOADS)
def test_each_load_is_one_that_the_client_can_send(load, tmp_path):
    trace = tmp_path / "trace.jsonl"
    asked = bench_options(load, 7, "http://127.0.0.1:1", 0.5, trace, tmp_path)
    asked.check()
    assert (asked.seed, asked.slo_ttft_ms, asked.slo_tpot_ms) == (7, 3000.0, 40.0)
    if load == "open":
        assert asked.request_rate == [2.0]
    if load == "trace":
        assert (asked.time_scale, asked.dataset_path) == (2.0, trace)
    if load == "closed":
        assert [group.name for group in read_scenario(asked.scenario).groups] == ["short", "long"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"clusters": ["auto", "sometimes"]}, "sometimes"),
        ({"loads": ["open", "shut"]}, "shut"),
        ({"loads": ["trace"]}, "--trace"),
        ({"seeds": []}, "seeds"),
        ({"cpus": "0"}, "--cpus"),
    ],
)
def test_what_can_not_be_measured_is_named(fields, named):
    with pytest.raises(BenchOptionsError, match=named):
        ThresholdOptions(**fields).check()


def test_the_table_has_the_middle_of_the_rounds():
    options = ThresholdOptions(clusters=["auto", "256"], loads=["open"], seeds=[1, 2, 3])
    outcomes = [
        Outcome(load="open", seed=seed, cluster=cluster, tokens=tokens, ttft_p99=wait, goodput=1.0, failed=0)
        for cluster in options.clusters
        for seed, tokens, wait in ((1, 1100.0, 0.25), (2, 900.0, 0.75), (3, 1000.0, 0.5))
    ]
    outcomes[-1] = Outcome(load="open", seed=3, cluster="256", tokens=10.0, ttft_p99=0.1, goodput=1.0, failed=0)
    out = io.StringIO()
    show(outcomes, options, Console(file=out, width=100))
    assert "1,000 / 0.50" in out.getvalue()
    assert "900 / 0.25" in out.getvalue()
