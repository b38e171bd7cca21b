"""What ``make hostile-campaign`` runs: one attacker, against a cluster of its own, beside a neighbour.

A violation prints the seed and what was sent last. Each thread of an attacker draws from the seed. The machine decides
how their requests interleave, so a seed repeats the requests and not the order between threads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .campaign import ATTACKERS, campaign


def options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(prog="python -P -m hostile", description=__doc__)
    parser.add_argument("--who", choices=sorted(ATTACKERS), required=True, help="the attacker")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of attack")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random choices")
    parser.add_argument("--backend", choices=("tcp", "shm"), default="tcp", help="how the cluster moves KV")
    return parser.parse_args()


def main() -> int:
    """Run one campaign. Returns 0 if nothing was violated."""
    args = options()
    folder = Path(tempfile.mkdtemp(prefix=f"hostile-campaign-{args.who}-"))
    print(f"{args.who}, seed {args.seed}, {args.minutes:g} minutes, {args.backend}; log in {folder}", flush=True)
    report = campaign(args.who, folder, args.backend, args.seed, 60 * args.minutes)
    print(report)
    if not report.problems:
        print("passed: nothing was violated")
    else:
        print(f'FAILED: make hostile-campaign HOSTILE="--who {args.who} --seed {args.seed} --minutes {args.minutes:g}"')
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
