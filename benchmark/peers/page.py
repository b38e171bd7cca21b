"""Writes ``docs/benchmarks.md`` from the results. Nothing on the page is typed by hand, so it can't be out of date."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template

from .cases import CASES, MIXED, MIXED_SLO, Case, Metric
from .engines import ENGINES, PD_FLAGS
from .install import LLAMA_CPP, NIXL, VLLM
from .machine import describe_machine
from .results import Results

PAIRS = (("pdserve", "vllm"), ("pdserve-gguf", "llamacpp"))
SPLIT_ENGINES = ("pdserve-pd", "pdserve", "vllm", "vllm-pd")
NOTHING = "–"

TEMPLATE = Path(__file__).with_name("page-template.md")


def write_page(page: Path, results: Results, images: Sequence[Path], threads: int) -> None:
    """Write the page; ``images`` lie in a folder beside it."""
    counts = [len(results.rounds(case, engine)) for case, engine in {(c, e) for c, e, _ in results.runs}]
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        vllm=VLLM,
        nixl=NIXL,
        llama=LLAMA_CPP,
        machine=describe_machine(),
        date=time.strftime("%Y-%m-%d"),
        pd_flags=" ".join(PD_FLAGS),
        rounds=_rounds(counts),
        threads=threads,
        pairs=pairs_table(results),
        split=split_section(results),
        plots="\n\n".join(f"![{path.stem.replace('_', ' ')}]({page.stem}/{path.name})" for path in images),
        slo=", ".join(f"{name} ≤ {int(limit):,} ms" for name, limit in MIXED_SLO.items()),
        client_cost=results.client_cost,
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(re.sub(r"\n{3,}", "\n\n", text), encoding="utf-8")


def _rounds(counts: Sequence[int]) -> str:
    """How often things were measured, in words; ``counts``: of each case on each engine."""
    least, most = min(counts, default=0), max(counts, default=0)
    if most == 1:
        return "one round"
    return f"{most} rounds" if least == most else f"{least} to {most} rounds (each table cell has those of its engine)"


def pairs_table(results: Results) -> str:
    """Engine against engine, for every case but the mixed load."""
    header = ["input/output tokens", "figure"]
    for ours, theirs in PAIRS:
        header += [ENGINES[ours].title, ENGINES[theirs].title, "ratio"]
    rows = [
        [case.title if i == 0 else "", metric.title, *_pair_cells(results, case, metric)]
        for case in CASES.values()
        if case is not MIXED
        for i, metric in enumerate(case.metrics)
    ]
    return markdown_table(header, rows, first_numeric=2)


def _pair_cells(results: Results, case: Case, metric: Metric) -> list[str]:
    cells = []
    for ours, theirs in PAIRS:
        ratio = results.ratio(case, ours, theirs, metric)
        cells += [_number(results.median(case, engine, metric)) for engine in (ours, theirs)]
        cells.append(_ratio(ratio))
    return cells


def split_section(results: Results) -> str:
    """Prefill and decode apart: each case that the split engines run, and how pdserve's compares with the others."""
    ours, *others = SPLIT_ENGINES
    sections = []
    for case in map(CASES.__getitem__, ENGINES[ours].cases):
        if not results.rounds(case.name, ours):
            continue
        header = ["figure", *(ENGINES[name].title for name in SPLIT_ENGINES)]
        header += [f"ratio to {ENGINES[name].title}" for name in others]
        rows = [
            [
                metric.title,
                *(_number(results.median(case, name, metric)) for name in SPLIT_ENGINES),
                *(_ratio(results.ratio(case, ours, name, metric)) for name in others),
            ]
            for metric in case.metrics
        ]
        title = case.title[0].upper() + case.title[1:]
        sections.append(f"{title}:\n\n{markdown_table(header, rows, first_numeric=1)}")
    return "## Prefill and decode apart, on the same cores\n\n" + "\n".join(sections) if sections else ""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], first_numeric: int) -> str:
    """A table whose columns from ``first_numeric`` on are right-aligned."""
    rule = ["---" if i < first_numeric else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"**{value:.2f}**"
