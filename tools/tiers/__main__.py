"""``python -P -m tools.tiers``: what the tiers behind the KV pool are worth on this machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from pdserve.benchmark.command import exit_code, wide_console
from pdserve.runtime.signals import exit_on_signals

from .agents import AgentResult, measure_agents
from .options import TierBenchOptions
from .pair import PairRow, measure_pair
from .resume import PLACES, ResumeResult, measure_resume

MILLION = 1e6

app = App(
    name="python -P -m tools.tiers",
    help="Start instances and measure what the tiers behind the KV pool are worth on this machine.",
    version_flags=[],
    default_parameter=Parameter(negative=(), consume_multiple=True),
)
DEFAULTS = TierBenchOptions()


def show_resume(result: ResumeResult, console: Console) -> None:
    """Print the times to the first token by where the KV came from, and the store's rates.

    The store is worth it from the rate that is printed, in MB/s.
    """
    table = Table("tokens", *(f"{place}: ms" for place in PLACES), "restarted / computed", "not computed")
    for row in result.rows:
        ms = [f"{1000 * row.seconds[place]:,.0f}" if place in row.seconds else "–" for place in PLACES]
        ratio = row.seconds["restarted"] / row.seconds["computed"]
        table.add_row(f"{row.tokens:,}", *ms, f"{ratio:.2f}", f"{row.cached['restarted']:.1%}")
    console.print(table)
    for row in result.rows:
        rate = row.tokens / row.seconds["computed"]
        console.print(
            f"{row.tokens:,} tokens: computed at {rate:,.0f}/s; a store is worth it from "
            f"{rate * result.kv_bytes / MILLION:,.0f} MB/s on ({result.kv_bytes:,.0f} bytes a token)"
        )
    rates = ", ".join(f"{place} {rate / MILLION:,.0f} MB/s" for place, rate in result.fetch_rate.items())
    console.print(f"The store gave: {rates}; it took {result.store_rate / MILLION:,.0f} MB/s")


def show_agents(results: list[AgentResult], console: Console) -> None:
    """Print a row for each set of cache tiers, and whether all answers are the same.

    A row has tokens computed and computed again, hits by tier, TTFT and the time of copies.
    """
    table = Table("behind the pool", "prompt tokens", "computed", "again", "found in pool / host / store", "TTFT, ms")
    table.add_column("copies, s")
    for r in results:
        found = " / ".join(f"{count:,}" for count in r.found.values())
        ttft, copies = f"{r.first_token_ms:,.0f}", f"{r.copy_seconds:.2f}"
        table.add_row(r.name, f"{r.prompt_tokens:,}", f"{r.computed:,}", f"{r.again:,}", found, ttft, copies)
    console.print(table)
    same = all(r.tokens == results[0].tokens for r in results)
    console.print("All answers are the same." if same else "ANSWERS DIFFER.")


def show_pair(rows: list[PairRow], console: Console) -> None:
    """Print the times of the first and second token, by which instances of a pair have the store.

    Also print the tokens that were computed and fetched, and the bytes handed over.
    """
    table = Table("tokens", "the prefill", "the store is", "first token, ms", "second token, ms")
    for heading in ("computed", "fetched by the decode", "handed over, MB"):
        table.add_column(heading)
    for r in sorted(rows, key=lambda row: (row.tokens, row.busy)):
        ms = (f"{1000 * seconds:,.0f}" for seconds in (r.first_token, r.second_token))
        counts = f"{r.computed:,}", f"{r.fetched_by_decode:,}", f"{r.handed_over_bytes / MILLION:,.1f}"
        table.add_row(f"{r.tokens:,}", "computes another" if r.busy else "is idle", r.name, *ms, *counts)
    console.print(table)


@app.default
def main(*, options: Annotated[TierBenchOptions, Parameter(name="*")] = DEFAULTS) -> int:
    """Run the measurement that --measure names, and print its table. Return the exit code."""
    exit_on_signals()
    console = wide_console()

    def measure() -> None:
        options.check()
        with tempfile.TemporaryDirectory(prefix="pdserve-tiers-") as folder:
            if options.measure == "resume":
                show_resume(measure_resume(options, Path(folder)), console)
            elif options.measure == "pair":
                show_pair(measure_pair(options, Path(folder)), console)
            else:
                show_agents(measure_agents(options, Path(folder)), console)

    return exit_code("tiers", measure)


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
