"""Round after round: each contestant gets a cluster of its own and the same requests, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from pdserve.benchmark.errors import ServerError
from pdserve.benchmark.serve import measure

from ..peers.layout import PeerSetup
from ..peers.processes import running
from .clusters import make_cluster
from .loads import bench_options
from .options import ThresholdOptions

MS = 1e3


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant under one load, with the requests of one seed.

    ``tokens``: output tokens a second. ``ttft_p99`` in seconds. ``goodput``: requests a second with their first token
    within 3 s and at most 40 ms for each token after it.
    """

    load: str
    seed: int
    cluster: str
    tokens: float
    ttft_p99: float
    goodput: float
    failed: int


def measure_thresholds(options: ThresholdOptions, notes: Console) -> Iterator[Outcome]:
    """Measure each contestant under each load, once for each seed. Yield each outcome when it is known.

    Outcomes are also appended to ``output_json``. Raises ``BenchError`` if a contestant can't be started or measured.
    """
    for seed in options.seeds:
        for load in options.loads:
            for contestant in options.contestants:
                outcome = _measure(options, contestant, load, seed, notes)
                if options.output_json is not None:
                    with options.output_json.open("ab") as file:
                        file.write(msgspec.json.encode(outcome) + b"\n")
                yield outcome


def _measure(options: ThresholdOptions, contestant: str, load: str, seed: int, notes: Console) -> Outcome:
    cluster = make_cluster(contestant, options.other_python, options.model_path, options.dtype)
    with tempfile.TemporaryDirectory(prefix="pdserve-thresholds-") as name:
        folder = Path(name)
        setup = PeerSetup(folder, tuple(int(core) for core in options.cpus.split(",")))
        with running(cluster, setup, folder) as url:
            asked = bench_options(load, seed, url, options.pace, options.trace, folder)
            [(_, report)] = uvloop.run(measure(asked, Console(quiet=True), notes))
    total = report.total
    if total.ttft is None:
        raise ServerError(f"{contestant} under {load}: no request was answered: {total.errors}")
    return Outcome(
        load=load,
        seed=seed,
        cluster=contestant,
        tokens=total.output_throughput,
        ttft_p99=total.ttft.p99 / MS,
        goodput=total.goodput or 0.0,
        failed=total.failed,
    )
