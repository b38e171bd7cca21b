"""What ``make template-campaign TEMPLATES=DIR`` runs: every chat template in a folder renders every conversation.

Each result is compared with that of transformers. The templates are other people's, so that none is in this repository.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pdserve.server.output_parsers.choice import AUTO, choose_formats

from .conversations import KINDS, Body
from .drawn import draw_bodies
from .judge import Comparison, Verdict, compare

ENDINGS = (".jinja", ".jinja2", ".j2")
BAD = (Verdict.DIFFERENT, Verdict.UNFOUNDED)


def main() -> int:
    """Compare, print a table and the totals. Returns 1 if a template renders otherwise, without a reason."""
    parser = argparse.ArgumentParser(prog="python -P -m template_campaign", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="folder with chat templates, in files that end in .jinja")
    parser.add_argument("--reasons", action="store_true", help="print the reason of every verdict that is not equal")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="render N random conversations instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random conversations")
    parser.add_argument("--texts", action="store_true", help="print both texts where they differ")
    args = parser.parse_args()
    if args.folder is None:
        print("template-campaign: skipped; name a folder with chat templates: make template-campaign TEMPLATES=DIR")
        return 0
    files = sorted(file for file in args.folder.rglob("*") if file.suffix in ENDINGS)
    if not files:
        print(f"template-campaign: {args.folder} has no file that ends in {', '.join(ENDINGS)}")
        return 2
    bodies = {f"seed {args.seed} no. {i}": body for i, body in enumerate(draw_bodies(args.seed, args.drawn))} or KINDS
    print(f"{'':60} {' '.join(f'{i:>2}' for i in range(1, len(bodies) + 1))}")
    groups: Counter[tuple[Verdict, str]] = Counter()
    for file in files:
        groups += _judge(file, file.relative_to(args.folder), bodies, args)
    totals: Counter[Verdict] = Counter()
    for (verdict, _), count in groups.items():
        totals[verdict] += count
    for i, kind in enumerate(bodies, 1):
        print(f"  {i:>2} {kind}")
    print(f"{len(files)} templates x {len(bodies)} conversations: ", end="")
    print(", ".join(f"{totals[verdict]} {verdict.name.lower()} ({verdict.value})" for verdict in Verdict))
    for (verdict, group), count in sorted(groups.items(), key=lambda item: -item[1]):
        if group:
            print(f"  {count:>5} {verdict.name.lower()}: {group}")
    return 1 if any(totals[verdict] for verdict in BAD) else 0


def _judge(
    file: Path, name: Path, bodies: Mapping[str, Body], args: argparse.Namespace
) -> Counter[tuple[Verdict, str]]:
    source = file.read_text(encoding="utf-8")
    compared = {kind: compare(source, body) for kind, body in bodies.items()}
    formats = choose_formats(AUTO, AUTO, source)
    chosen = f"{formats.calls.name if formats.calls else '-'} / {formats.reasoning.name if formats.reasoning else '-'}"
    letters = "  ".join(result.verdict.value for result in compared.values())
    print(f"{str(name)[:60]:60}  {letters}  {chosen}")
    for kind, result in compared.items():
        if result.verdict in BAD or (args.reasons and result.verdict is not Verdict.EQUAL):
            _print_reason(kind, result, args.texts)
    return Counter((result.verdict, result.group) for result in compared.values())


def _print_reason(kind: str, result: Comparison, texts: bool) -> None:
    print(f"      {result.verdict.name.lower()}, {kind}: {result.reason[:300]}")
    if texts and result.verdict in BAD:
        print(f"        pdserve:      {result.ours!r}\n        transformers: {result.theirs!r}")


if __name__ == "__main__":
    sys.exit(main())
