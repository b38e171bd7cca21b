"""``pdserve bench serve``: measures a server under each load that the options name."""

from __future__ import annotations

import sys

import uvloop
from rich.console import Console

from ..runtime.exit_codes import EXIT_FAILED
from .backends import make_backend
from .errors import BenchError, RequestError, ServerError
from .http_client import HttpClient
from .metrics import RunReport, Slo, report_run
from .options import BenchOptions
from .progress import ProgressView
from .report import print_run, write_json
from .runner import LoadRunner, RunResult
from .workload import WorkloadSource


def run_bench(options: BenchOptions) -> int:
    """Measure every load, print the tables and write the files; return the exit code.

    It is 1 if the benchmark or every request failed. With ``strict``, one failed request is enough.
    """
    # The tables are the result; progress is not, and goes where it can't get into a file of results.
    console, notes = Console(), Console(stderr=True)
    try:
        if options.plot is not None:
            from .plots import require_matplotlib

            require_matplotlib()
        runs = uvloop.run(measure(options, console, notes))
        if options.output_json is not None:
            write_json(options.output_json, options, runs, options.output_details)
        if options.plot is not None:
            from .plots import plot_runs

            for path in plot_runs(options.plot, runs):
                notes.print(f"[dim]{path}[/dim]", highlight=False)
    except (BenchError, OSError) as e:
        print(f"pdserve bench serve: {e}", file=sys.stderr)
        return EXIT_FAILED
    failed = sum(report.total.failed for _, report in runs)
    return EXIT_FAILED if not any(r.total.completed for _, r in runs) or (options.strict and failed) else 0


async def measure(options: BenchOptions, console: Console, notes: Console) -> list[tuple[RunResult, RunReport]]:
    """Measure every load in turn, print its report to ``console``, and return the results. Raises ``BenchError``.

    ``notes``: console for the progress.
    """
    source = WorkloadSource(options)
    slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms, options.slo_itl_ms, options.slo_e2e_ms)
    progress = ProgressView(notes)
    client = HttpClient(options.base_url, options.key)
    backend = make_backend(options)
    runs = []
    try:
        await backend.prepare(client)
        runner = LoadRunner(client, backend, options.request_timeout, options.drain_timeout, progress.advance)
        for step, load in enumerate(source.loads):
            workload = source.build(step, load)
            with progress.showing(f"warming up ({workload.label})", len(workload.warmup)):
                await runner.warm_up(workload)
            if options.flush_cache:
                await _flush_cache(client)
            total = (
                None
                if any(group.count is None for group in workload.groups)
                else sum(group.count or 0 for group in workload.groups)
            )
            with progress.showing(workload.label, total):
                result = await runner.run(workload)
            report = report_run(result, slo)
            print_run(console, report)
            runs.append((result, report))
    finally:
        client.close()
    return runs


async def _flush_cache(client: HttpClient) -> None:
    try:
        await client.post("/flush_cache")
    except RequestError as e:
        raise ServerError(f"the prefix cache could not be flushed: {e}") from e
