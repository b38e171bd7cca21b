"""Writes the table of endpoints in ``docs/http-api.md`` from the declarations of paths. ``make docs`` runs it.

A test compares the page with the code.
"""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import Access, AtRouter, PathFacts

FOLDER = Path(__file__).parent
PAGE = FOLDER / "http-api.md"
PAGES = ("http-api.md", "sessions.md")
"""Pages with a section for an endpoint."""
BEGIN = "<!-- Written by `make docs` from runtime/web/apis.py: edit that. -->"
END = "<!-- End of the table of endpoints. -->"
BETWEEN = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
KEYS = {
    Access.OPEN: "none",
    Access.METRICS: "any; none with `--metrics-without-key`",
    Access.USER: "any",
    Access.CACHE: "the admin's, if there are keys",
    Access.ADMIN: "the admin's",
    Access.ROUTER_ADMIN: "the router's admin's",
}
AT_ROUTER = {
    AtRouter.NOT_FOUND: "404",
    AtRouter.GENERATE: "sent to a pair or a worker",
    AtRouter.READ_PROMPT: "sent to a prefill or a worker",
    AtRouter.ASK_ONE: "one instance's answer",
    AtRouter.OWN: "the router's own answer",
}


def render() -> str:
    """Return the page with the table as the code has it."""
    rows = [("endpoint", "what it does", "key", "at a router"), ("---",) * 4, *map(row, PATHS)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return BETWEEN.sub(lambda _: f"{BEGIN}\n\n{table}\n\n{END}", PAGE.read_text(encoding="utf-8"))


def row(facts: PathFacts) -> tuple[str, str, str, str]:
    """Return the cells of one path."""
    at_router = AT_ROUTER[facts.at_router] if facts.module else "only there"
    return linked(facts), facts.does, KEYS[facts.access], at_router


def linked(facts: PathFacts) -> str:
    """Return the endpoint as a reader writes it, with a link to the first section that has its name in the heading."""
    name = re.sub(r"\{(\w+):path\}", lambda match: match[1].upper(), facts.path)
    wanted = re.compile(rf"{facts.methods[0]} {re.escape(name)}(?![\w/])")
    text = f"`{', '.join(facts.methods)} {name}`"
    for page in PAGES:
        for heading in re.findall(r"^#+ (.*)$", (FOLDER / page).read_text(encoding="utf-8"), flags=re.MULTILINE):
            if wanted.search(heading):
                anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                return f"[{text}]({'' if page == PAGE.name else page}#{anchor})"
    return text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
