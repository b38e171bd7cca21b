"""What ``make reader-campaign`` runs: damaged files for every reader, each case drawn from a seed and its number."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .campaign import campaign
from .cases import READERS


def options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(prog="make reader-campaign", description=__doc__)
    parser.add_argument("--reader", nargs="+", choices=sorted(READERS), help="these alone")
    parser.add_argument("--seed", type=int, default=1, help="seed of all cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--count", type=int, default=100_000, help="cases of each reader; limited-template has one in 50"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no worker of a reader starts later")
    parser.add_argument("--show", type=int, default=5, help="failures of each reader that are printed in full")
    return parser.parse_args()


def main() -> int:
    """Run the command line; returns 0 if no case failed."""
    args = options()
    failed = False
    for name in args.reader or READERS:
        folder = Path(tempfile.mkdtemp(prefix="readers-"))
        report = campaign(name, args.seed, args.first, args.count, folder, 60 * args.minutes)
        print(f"{name}: {report}", flush=True)
        for failure in report.failures[: args.show]:
            again = f"--reader {name} --seed {args.seed} --first {failure.case} --count 1"
            print(f'  FAILED: make reader-campaign READERS="{again}": {failure.wrong}', flush=True)
        failed = failed or bool(report.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
