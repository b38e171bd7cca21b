"""What `make chaos` runs: the campaign of each backend in a process, and a network, of its own; then the table."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from support.libraries import is_missing
from support.machine import processor, slowness

from .campaign import left_out
from .hosts import inside, why_not
from .judge import Verdict
from .options import Options
from .table import rendered, write

NO_LINK = "On one host there is no link between two instances that could be cut; their control connections are reset."


def one_backend(backend: str, options: Options, alone: bool) -> tuple[list[Verdict], int]:
    """Run its campaign; what it found, and its exit code."""
    with tempfile.NamedTemporaryFile(prefix="pdserve-chaos-", suffix=".jsonl") as result:
        argv = [*(inside() if alone else ()), sys.executable, "-P", "-m", "chaos.campaign", backend]
        argv += [str(options.faults), str(options.seed), "inside" if alone else "outside", result.name]
        with subprocess.Popen(argv) as child:
            try:
                code = child.wait()
            except BaseException:
                child.send_signal(signal.SIGINT)  # it ends what it has started
                raise
        return [Verdict(**json.loads(line)) for line in Path(result.name).read_text().splitlines()], code


def main() -> int:
    """Run the campaign. Returns 0 if nothing was wrong, late or leaked, and all of it was run."""
    options = Options.of()
    reason = why_not()
    print(f"{options.command}\nlimits: {slowness():.2f} times those written down, as measured here", flush=True)
    if reason:
        print(f"no hosts of our own here, so no link is cut: {reason}", flush=True)
    verdicts: dict[str, list[Verdict]] = {}
    remarks: dict[str, str] = {}
    failed = False
    for backend in options.backends:
        if is_missing(backend):
            remarks[backend] = "Not run: it is not installed."
            verdicts[backend] = []
            continue
        verdicts[backend], code = one_backend(backend, options, alone=reason is None)
        failed |= code != 0 or not all(verdict.good for verdict in verdicts[backend])
        if reason:
            remarks[backend] = f"No link was cut, for want of hosts of our own: {reason}."
        elif left_out(backend, inside=True):
            remarks[backend] = NO_LINK
    cores = len(os.sched_getaffinity(0))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = [f"`{options.command}`", f"{processor()}, {cores} cores, {today}"]
    text = rendered(verdicts, remarks, facts)
    print(text)
    write(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
