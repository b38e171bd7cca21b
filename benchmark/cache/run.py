"""``pdserve bench cache``: what our tree, queue and allocator take, against bars and beside others."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...runtime.python import python_command
from ..errors import BenchError
from .hit_rates import HitRate, draw, hit_rate, make_jobs, table, totals
from .options import CacheBenchOptions
from .waiting_order import QueueTimes, measure_queue
from .workload import write_workload

Times = dict[str, list[float]]
"""µs of each call, by what was done."""


class Row(NamedTuple):
    """Row of the table."""

    key: str
    """Measurement of ours, and of SGLang's."""
    bar: float | None
    """Its limit in µs; None without one."""
    vllm: str | None
    """Measurement of vLLM's beside it."""
    what: str


ROWS = (
    Row("match", 150, "match", "match {prompt_tokens:,} tokens, {path_nodes} nodes, from token ids"),
    Row("match", None, "lookup", "the same, beside vLLM's lookup alone, with hashes at hand"),
    Row("insert", None, None, "insert the prompt and 512 more, from its first token"),
    Row("store", None, "store", "store 512 tokens behind the cached prompt"),
    Row("decode", 30, "decode", "a slot for each of {decoding} requests"),
    Row("evict", 5000, "evict", "evict {evicted_tokens:,} tokens"),
)
LPM_BAR = 10_000.0


def run_cache_bench(options: CacheBenchOptions) -> int:
    """Measure speeds, or hit rates if there is a trace; print tables and write files. Returns the exit code."""
    try:
        return _hit_rates(options) if options.trace is not None else _speeds(options)
    except BenchError as e:
        print(f"pdserve bench cache: {e}", file=sys.stderr)
        return 1


def _speeds(options: CacheBenchOptions) -> int:
    ours: Times = defaultdict(list)
    theirs: dict[str, Times] = {"sglang": defaultdict(list), "vllm": defaultdict(list)}
    pythons = {"sglang": options.sglang_python, "vllm": options.vllm_python}
    with tempfile.TemporaryDirectory() as folder:
        load = Path(folder) / "workload.npz"
        write_workload(options, load)
        for _ in range(options.rounds):
            _gather(ours, python_command("-m", "pdserve.benchmark.cache.ours", str(load)))
            for name, python in pythons.items():
                if python is not None:
                    script = Path(__file__).with_name(f"{name}_side.py")
                    _gather(theirs[name], [str(python), str(script), str(load)])
    size = f"{options.cached_tokens:,} tokens, pages of {options.page_size}"
    print(f"A tree of {size}; medians of {options.rounds} rounds.\n")
    print("| µs | pdserve | P99 | bar | SGLang | times as fast | vLLM | times as fast |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in ROWS:
        others = theirs["sglang"].get(row.key), theirs["vllm"].get(row.vllm or "")
        _print(row.what.format(**asdict(options)), ours[row.key], row.bar, others)
    queue = measure_queue(options)
    _tell_queue(options, queue)
    if options.output_json is not None:
        results = {"pdserve": ours, **theirs, "queue": queue._asdict()}
        options.output_json.write_bytes(msgspec.json.encode(results))
    return 0


def _tell_queue(options: CacheBenchOptions, queue: QueueTimes) -> None:
    step, brute, whole = (statistics.median(times) / 1e3 for times in (queue.step, queue.brute, queue.whole))
    print(f"\n{options.queued:,} requests wait, in order of longest cached prefix:\n")
    print("| ms | median | P99 | bar |\n|---|---:|---:|---:|")
    what = (
        f"a step: a few get memory ({queue.losses} evictions in {len(queue.step)} steps), what they compute is stored"
    )
    print(f"| {what} | {step:.2f} | {_p99(queue.step) / 1e3:.2f} | {LPM_BAR / 1e3:.0f} |")
    print(f"| all of them put in order | {whole:.1f} | {_p99(queue.whole) / 1e3:.1f} | |")
    print(f"| brute force: the tree is asked for each | {brute:.1f} | {_p99(queue.brute) / 1e3:.1f} | |")
    print(f"\nThe order was brute force's each of {len(queue.brute)} times.")


def _print(what: str, ours: list[float], bar: float | None, others: Iterable[list[float] | None]) -> None:
    mine = statistics.median(ours)
    cells = [f"{mine:,.1f}", f"{_p99(ours):,.1f}", f"{bar:,.0f}" if bar else ""]
    for times in others:
        their = statistics.median(times) if times else None
        cells += [f"{their:,.1f}", f"{their / mine:.1f}"] if their is not None else ["", ""]
    print(f"| {what} | " + " | ".join(cells) + " |")


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


def _gather(times: Times, argv: list[str]) -> None:
    """Run the command ``argv``, one contestant's program, to its end, and add the times that it prints to ``times``.

    Raises ``BenchError``.
    """
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as e:
        raise BenchError(f"{argv[0]} can't be run: {e}") from e
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-8:])
        raise BenchError(f"{' '.join(argv[:3])} ended with {done.returncode}:\n{tail}")
    # Libraries print what they like before and behind it.
    answer = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    for name, values in json.loads(answer).items():
        times[name] += values


def _hit_rates(options: CacheBenchOptions) -> int:
    assert options.trace is not None
    if options.plot is not None:
        from ..plots import require_matplotlib

        require_matplotlib()
    jobs = make_jobs(options)
    total = totals(jobs, options.page_size)
    print(
        f"{options.trace.name}: {len(jobs):,} requests, {total.prompt_tokens:,} prompt tokens, of which "
        f"{total.different_tokens:,} differ by their prefix. With nothing ever evicted, {total.bound:.3f} are hits.\n"
    )
    rates: list[HitRate] = []
    for share in options.pool_share:
        for policy in options.policies:
            rates.append(hit_rate(options, policy, share, jobs, total.different_tokens))
            print(f"{rates[-1]}", file=sys.stderr, flush=True)
    print(table(rates, total.bound))
    left_out = {rate.share: len(jobs) - rate.requests for rate in rates if rate.requests < len(jobs)}
    for share, count in left_out.items():
        print(f"\nOf {share:.0%}, {count} requests were left out, which don't fit the pool.")
    if options.plot is not None:
        draw(options.plot, rates, total.bound)
    if options.output_json is not None:
        options.output_json.write_bytes(msgspec.json.encode([asdict(rate) for rate in rates]))
    return 0
