"""The campaign's result for people: a table for each backend, between two markers of docs/reliability.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from .faults import deck
from .judge import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- written by `make chaos` -->", "<!-- as far as here -->"
COLUMNS = (
    "fault",
    "faults",
    "requests",
    "finished",
    "aborted",
    "errors",
    "recomputed",
    "wrong",
    "late",
    "leaked",
    "slowest error, s",
    "slowest recovery, s",
)
WORDS = ("fault", "errors")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'|'.join('---' if column in WORDS else '--:' for column in COLUMNS)}|"


def rendered(verdicts: Mapping[str, Sequence[Verdict]], left_out: Mapping[str, str], facts: Sequence[str]) -> str:
    """Return all tables. ``left_out``: by backend what was not done, and why. ``facts`` come first."""
    parts = ["\n".join(f"- {fact}" for fact in facts)]
    for backend, results in verdicts.items():
        parts.append(f"### {backend}\n\n{table(results)}")
        if backend in left_out:
            parts.append(left_out[backend])
    return "\n\n".join(parts)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a table with a row for each kind of fault that was done, and one for all."""
    kinds = [kind.value.format(process) for kind, process in deck()]
    rows = [(kind, [v for v in verdicts if v.row == kind]) for kind in kinds]
    return "\n".join([HEAD, *(row(kind, some) for kind, some in rows if some), row("**all**", verdicts)])


def row(name: str, verdicts: Sequence[Verdict]) -> str:
    """Return a row with the sum of some episodes."""
    errors: Counter[str] = Counter()
    for verdict in verdicts:
        errors.update(verdict.errors)
    total = lambda what: str(sum(getattr(v, what) for v in verdicts))  # noqa: E731
    most = lambda what: f"{max((getattr(v, what) for v in verdicts), default=0):.1f}"  # noqa: E731
    cells = [
        name,
        str(len(verdicts)),
        total("requests"),
        total("finished"),
        total("aborted"),
        ", ".join(f"{count} {error}" for error, count in sorted(errors.items())) or "–",
        *(total(what) for what in ("recomputed", "wrong", "late", "leaked")),
        most("slowest_error") if errors else "–",
        most("recovery"),
    ]
    return f"| {' | '.join(cells)} |"


def write(text: str, page: Path = PAGE) -> None:
    """Put ``text`` between the page's markers."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
