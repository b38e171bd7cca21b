"""Writes ``docs/benchmarks.md`` and a page for each kind of machine from the results.

Nothing on the pages is typed by hand, so they can't be out of date. A run leaves the pages of other machines alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template

from .cases import CASES, MIXED, MIXED_SLO, Case, Metric
from .engines import ENGINES
from .install import LLAMA_CPP, NIXL, VLLM
from .results import Results

PAIRS = (("pdserve", "vllm"), ("pdserve-gguf", "llamacpp"), ("pdserve-q4km", "llamacpp-q4km"))
SPLIT_ENGINES = ("pdserve-pd", "pdserve", "vllm", "vllm-pd")
NOTHING = "–"

INDEX_TEMPLATE = Path(__file__).with_name("index-template.md")
MACHINE_TEMPLATE = Path(__file__).with_name("machine-template.md")


def write_machine_page(folder: Path, results: Results, images: Sequence[Path], threads: int) -> Path:
    """Write the page of the results' machine into ``folder``, and return its path. Other machines' pages stay.

    ``images``: plots, which lie in a folder beside the page. ``threads``: compute threads of each deployment.
    """
    counts = [len(results.rounds(case, engine)) for case, engine in {(c, e) for c, e, _ in results.runs}]
    page = folder / f"{results.machine.slug}.md"
    _write(
        page,
        MACHINE_TEMPLATE,
        machine=results.machine.line,
        date=time.strftime("%Y-%m-%d"),
        rounds=_rounds(counts),
        threads=threads,
        pairs=pairs_table(results),
        split=split_section(results),
        plots="\n\n".join(f"![{p.stem.replace('_', ' ')}]({p.parent.name}/{p.name})" for p in images),
        client_cost=results.client_cost,
    )
    return page


def write_index(page: Path) -> None:
    """Write the page that explains the measurement and lists the machines that have a page beside it."""
    folder = page.with_suffix("")
    titles = {path: path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ") for path in folder.glob("*.md")}
    _write(
        page,
        INDEX_TEMPLATE,
        machines="\n".join(f"- [{title}]({folder.name}/{path.name})" for path, title in sorted(titles.items())),
        vllm=VLLM,
        nixl=NIXL,
        llama=LLAMA_CPP,
        slo=", ".join(f"{name} ≤ {int(limit):,} ms" for name, limit in MIXED_SLO.items()),
    )


def _write(page: Path, template: Path, **values: object) -> None:
    text = Template(template.read_text(encoding="utf-8")).substitute(values)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(re.sub(r"\n{3,}", "\n\n", text), encoding="utf-8")


def _rounds(counts: Sequence[int]) -> str:
    """Return in words how often things were measured. ``counts``: rounds of each case on each engine."""
    least, most = min(counts, default=0), max(counts, default=0)
    if most == 1:
        return "one round"
    return f"{most} rounds" if least == most else f"{least} to {most} rounds (each table cell has those of its engine)"


def pairs_table(results: Results) -> str:
    """Return a Markdown table that compares pairs of engines in every case but the mixed load."""
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
    """Return a Markdown section on engines with separate prefill and decode instances; "" without results.

    It has a table for each case, with pdserve's ratios to the other engines.
    """
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
    """Return a Markdown table. Its columns from ``first_numeric`` on are right-aligned."""
    rule = ["---" if i < first_numeric else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"**{value:.2f}**"
