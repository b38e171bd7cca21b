"""Entry point of ``make campaigns``: plays simulated campaigns of every mix in turn, until the time is over.

Each campaign is named by its mix and seed, and a failed one prints the command that plays it again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time

from .mixes import MIXES
from .pool import results
from .runner import Tally, table


def options() -> argparse.Namespace:
    """Parse the options of the command line."""
    parser = argparse.ArgumentParser(prog="make campaigns", description=__doc__)
    parser.add_argument("--mix", nargs="+", metavar="NAME", help="play these alone: " + ", ".join(MIXES))
    parser.add_argument("--seed", type=int, default=1, help="seed of the first campaign of each mix")
    parser.add_argument("--count", type=int, help="campaigns of each mix; without it as many as the time allows")
    parser.add_argument("--minutes", type=float, default=60.0, help="no campaign is begun later")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="campaigns at a time")
    args = parser.parse_args()
    if unknown := set(args.mix or ()) - set(MIXES):
        parser.error(f"there is no mix {', '.join(sorted(unknown))}; choose from {', '.join(MIXES)}")
    return args


def main() -> int:
    """Run the command line; return 0 if no campaign failed."""
    args = options()
    tallies = {name: Tally() for name in args.mix or MIXES}
    seeds = itertools.count(args.seed) if args.count is None else range(args.seed, args.seed + args.count)
    drawn = ((name, seed) for seed in seeds for name in tallies)
    try:
        for name, tally in results(drawn, args.workers, time.monotonic() + 60 * args.minutes):
            tallies[name].add(tally)
            for failure in tally.failures:
                print(failure, flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(table(tallies.items()))
    print(f"{sum(tally.handovers for tally in tallies.values())} hand-overs in all")
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
