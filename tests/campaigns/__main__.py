"""What ``make campaigns`` runs: simulated campaigns of every mix by turns, until the time is over.

Each campaign is named by its mix and seed, and a failed one prints the command that plays it again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from .mixes import MIXES
from .runner import Tally, play, silence, table


def options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="make campaigns", description=__doc__)
    parser.add_argument("--mix", nargs="+", metavar="NAME", help="play these alone: " + ", ".join(MIXES))
    parser.add_argument("--seed", type=int, default=1, help="of the first campaign of each mix")
    parser.add_argument("--count", type=int, help="campaigns of each mix; without it as many as the time allows")
    parser.add_argument("--minutes", type=float, default=60.0, help="no campaign is begun later")
    args = parser.parse_args()
    if unknown := set(args.mix or ()) - set(MIXES):
        parser.error(f"there is no mix {', '.join(sorted(unknown))}; choose from {', '.join(MIXES)}")
    return args


def main() -> int:
    """0 when no campaign failed."""
    args = options()
    silence()
    tallies = {name: Tally() for name in args.mix or MIXES}
    ends_at = time.monotonic() + 60 * args.minutes
    seeds = itertools.count(args.seed) if args.count is None else range(args.seed, args.seed + args.count)
    try:
        for seed, name in ((seed, name) for seed in seeds for name in tallies):
            if time.monotonic() > ends_at:
                break
            if (failure := play(name, MIXES[name], seed, tallies[name])) is not None:
                print(failure, flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(table(tallies.items()))
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
