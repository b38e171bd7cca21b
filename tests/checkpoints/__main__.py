"""Entry point of ``make checkpoint-campaign``: compares every variant of checkpoints and GGUF files with transformers.

Prints each failure, then a table. ``--list`` prints what became of each variant.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from .campaign import all_variants, play, summary, unused_exemptions
from .judge import Verdict


def main() -> int:
    """Run the command line; return 0 if no variant failed."""
    parser = argparse.ArgumentParser(prog="make checkpoint-campaign", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="compare the variants with this in their name")
    parser.add_argument("--list", action="store_true", help="print every variant, not only failures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    variants = [variant for variant in all_variants() if args.only in variant.name]
    begin, outcomes = time.monotonic(), []
    with TemporaryDirectory() as folder:
        for outcome in play(variants, Path(folder)):
            outcomes.append(outcome)
            if args.list or outcome.verdict is Verdict.FAILED:
                print(f"{outcome.verdict}: {outcome.variant.name}: {outcome.why}", flush=True)
    print(summary(outcomes))
    print(f"{time.monotonic() - begin:.0f} s")
    unused = [] if args.only else unused_exemptions(outcomes)
    for reason in unused:
        print(f"no variant needs this exemption any more: {reason}")
    return int(bool(unused) or any(outcome.verdict is Verdict.FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
