"""``pdserve bench transfer``: how fast each transfer backend moves KV pages between two processes of this host."""

from __future__ import annotations

import sys

from rich.console import Console

from ...mem_cache.kv_pages.region import RegionError
from ...runtime.exit_codes import EXIT_FAILED
from ..command import wide_console
from .messages import How
from .options import TransferBenchOptions
from .report import print_cases, print_problems, write_json
from .rounds import TransferBench


def run_transfer_bench(options: TransferBenchOptions) -> int:
    """Measure all cases, print the tables and write the file; return the exit code.

    It is 1 if something failed, or no backend could be measured.
    """
    console = wide_console()
    bench = TransferBench(options, Console(stderr=True))
    try:
        for cases in bench.run():
            print_cases(console, cases)
        results = bench.results
        print_problems(console, results)
        if options.output_json is not None:
            write_json(options.output_json, options, results)
    except (RegionError, OSError) as e:
        print(f"pdserve bench transfer: {e}", file=sys.stderr)
        return EXIT_FAILED
    is_measured = any(way.how is How.ENGINE for result in results.cases for way in result.rounds)
    return EXIT_FAILED if results.failed or not is_measured else 0
