"""All variants, and what a run of them finds."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from .exemptions import EXEMPTIONS
from .file_statements import file_variants, json_cases
from .gguf_statements import GGUFVariant, gguf_variants
from .head_statements import head_variants
from .judge import Outcome, Verdict, judge, judge_gguf
from .rope_statements import rope_variants
from .sampling_statements import sampling_variants
from .sentencepiece_statements import sentencepiece_variants
from .token_statements import token_variants
from .value_statements import value_variants
from .variant import Variant

AnyVariant = Variant | GGUFVariant


def all_variants() -> list[AnyVariant]:
    """Return all variants, the same ones each time."""
    return list(
        chain(
            rope_variants(),
            head_variants(),
            file_variants(),
            json_cases(),
            token_variants(),
            sampling_variants(),
            gguf_variants(),
            sentencepiece_variants(),
            value_variants(),
        )
    )


def play(variants: Iterable[AnyVariant], folder: Path) -> Iterator[Outcome]:
    """Judge each of ``variants`` in a fresh folder of its own within ``folder``."""
    for variant in variants:
        own = folder / "variant"
        shutil.rmtree(own, ignore_errors=True)
        if isinstance(variant, GGUFVariant):
            yield judge_gguf(variant, own, folder / "bases")
        else:
            yield judge(variant, own, folder / "bases")


def unused_exemptions(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the reasons of exemptions that none of ``outcomes`` needs."""
    used = {outcome.why for outcome in outcomes if outcome.verdict is Verdict.EXEMPT}
    return [exemption.reason for exemption in EXEMPTIONS if exemption.reason not in used]


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a table of verdicts by group of variants."""
    groups: dict[str, Counter[Verdict]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.variant.name.partition(":")[0], Counter())[outcome.verdict] += 1
    width = max(map(len, groups))
    total = sum(groups.values(), Counter[Verdict]())
    lines = [f"{'':{width}}  variants  " + "  ".join(Verdict)]
    for name, counts in [*groups.items(), ("all", total)]:
        cells = "  ".join(f"{counts[verdict]:{len(verdict)}d}" for verdict in Verdict)
        lines.append(f"{name:{width}}  {counts.total():8d}  {cells}")
    return "\n".join(lines)
