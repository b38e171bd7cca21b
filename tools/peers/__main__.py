"""``python -P -m tools.peers``: installs the peers, measures all engines in turn, writes the page."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from pdserve.benchmark.errors import PlotsUnavailable
from pdserve.benchmark.plots import require_matplotlib
from pdserve.runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from pdserve.runtime.signals import exit_on_signals

from .compare import Comparison
from .errors import PeerError
from .install import install_all
from .layout import PeerSetup
from .machine import this_machine
from .options import PeerOptions
from .page import write_index, write_machine_page
from .results import Results, claim

DEFAULTS = PeerOptions()

app = App(
    name="python -P -m tools.peers",
    help="Compare pdserve with vLLM and llama.cpp on this machine.",
    version_flags=[],
    default_parameter=Parameter(negative=(), consume_multiple=True),
)


@app.default
def peers(*, options: Annotated[PeerOptions, Parameter(name="*")] = DEFAULTS) -> int:
    """Install the engines, measure them and write the page of results, or only what --steps names.

    Return the exit code.
    """
    exit_on_signals()
    try:
        options.check()
    except ValueError as e:
        return _fail(str(e), EXIT_USAGE)
    setup = PeerSetup(options.build_dir.absolute(), tuple(sorted(os.sched_getaffinity(0))))
    failures: list[str] = []
    results = options.results_dir()
    try:
        if "page" in options.steps:
            require_matplotlib()
        if "install" in options.steps:
            install_all(setup, _say)
        if "run" in options.steps:
            claim(results, this_machine())
            comparison = Comparison(setup, results, _say)
            comparison.measure_client()
            failures = comparison.run(options.rounds, options.engines, options.cases)
        if "page" in options.steps:
            _write(options.page, Results.read(results), setup.threads)
    except (PeerError, PlotsUnavailable) as e:
        return _fail(str(e), EXIT_FAILED)
    return _fail(f"{len(failures)} runs failed", EXIT_FAILED) if failures else 0


def _write(page: Path, results: Results, threads: int) -> None:
    from .charts import draw_charts

    folder = page.with_suffix("")
    images = draw_charts(folder / results.machine.slug, results)
    written = write_machine_page(folder, results, images, threads)
    write_index(page)
    _say(f"wrote {written} with {len(images)} plots, and {page}, which lists it")


def _say(text: str) -> None:
    print(text, flush=True)


def _fail(text: str, code: int) -> int:
    print(f"peers: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
