"""``python -P -m tools.thresholds``: measures which instance should compute a prompt."""

from __future__ import annotations

import sys
from statistics import median
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from pdserve.benchmark.command import exit_code, wide_console
from pdserve.runtime.signals import exit_on_signals

from .options import ThresholdOptions
from .run import Outcome, measure_thresholds

app = App(
    name="python -P -m tools.thresholds",
    help="Start clusters of every --disaggregation-threshold and of unified instances, and send each the same loads.",
    version_flags=[],
    default_parameter=Parameter(negative=(), consume_multiple=True),
)
DEFAULTS = ThresholdOptions()


def show(outcomes: list[Outcome], options: ThresholdOptions, console: Console) -> None:
    """Print two tables by load and contestant: throughput with the first token's P99 in seconds, and goodput.

    The figures are medians over the rounds.
    """
    for title, form in (
        ("output tokens a second / P99 of the first token, s", figures),
        ("goodput (first token within 3 s, 40 ms a token), requests a second", goodput),
    ):
        table = Table("load", *options.contestants, title=title)
        for load in options.loads:
            cells = [middle(load, contestant, outcomes) for contestant in options.contestants]
            table.add_row(load, *(form(cell) for cell in cells))
        console.print(table)


def figures(outcome: Outcome) -> str:
    """Format an outcome's output tokens per second and the P99 of its times to the first token, in seconds."""
    return f"{outcome.tokens:,.0f} / {outcome.ttft_p99:.2f}"


def goodput(outcome: Outcome) -> str:
    """Format an outcome's goodput: requests per second that keep both time limits."""
    return f"{outcome.goodput:.2f}"


def middle(load: str, cluster: str, outcomes: list[Outcome]) -> Outcome:
    """Return the median over all rounds of each figure of ``cluster`` under ``load``. Failed requests are added up."""
    of = [o for o in outcomes if (o.load, o.cluster) == (load, cluster)]
    return Outcome(
        load=load,
        seed=of[0].seed,
        cluster=cluster,
        tokens=median(o.tokens for o in of),
        ttft_p99=median(o.ttft_p99 for o in of),
        goodput=median(o.goodput for o in of),
        failed=sum(o.failed for o in of),
    )


@app.default
def main(*, options: Annotated[ThresholdOptions, Parameter(name="*")] = DEFAULTS) -> int:
    """Measure each contestant under each load, and print tables of the medians. Return the exit code."""
    exit_on_signals()
    console, notes = wide_console(), Console(stderr=True)

    def measure() -> bool:
        options.check()
        outcomes = []
        for outcome in measure_thresholds(options, notes):
            failed = f", {outcome.failed} FAILED" if outcome.failed else ""
            what = f"{outcome.load} {outcome.seed} {outcome.cluster}"
            notes.print(f"{what}: {figures(outcome)}{failed}", highlight=False)
            outcomes.append(outcome)
        show(outcomes, options, console)
        return not any(outcome.failed for outcome in outcomes)

    return exit_code("thresholds", measure)


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
