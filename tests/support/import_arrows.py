"""Reads which module of the product imports which, and says what runs up or in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FLOORS = (
    *("messages", "runtime", "model_files"),
    *("mem_cache", "scheduler", "model_runner", "disaggregation", "detokenizer", "router", "terminal"),
    *("benchmark", "server", "tools"),
)
"""Folders from the ground up. ``server`` holds the command line, which starts all others; the product imports no tools.
"""


class Arrow(NamedTuple):
    """Line ``line`` of module ``source`` ("scheduler.planner") imports module ``target``."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source.replace('.', '/')}.py:{self.line} imports {self.target}"


def read_arrows(root: Path) -> list[Arrow]:
    """Return every import of one product module by another, anywhere in a file (also for type checkers)."""
    files = [f for floor in root.iterdir() if (floor / "__init__.py").is_file() for f in floor.rglob("*.py")]
    modules = {_module(f.relative_to(root)) for f in files if f.relative_to(root).parts[0] not in ("tests", "docs")}
    arrows = []
    for file in files:
        source = _module(file.relative_to(root))
        if source in modules:
            arrows += [Arrow(source, to, line) for to, line in _imports(file, root) if to in modules and to != source]
    return arrows


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: Path, root: Path) -> Iterator[tuple[str, int]]:
    package = list(file.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith(("pdserve.", "tools.")):
                    yield name.name.removeprefix("pdserve."), node.lineno
        elif isinstance(node, ast.ImportFrom):
            words = node.module.split(".") if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *words]
            elif words[:1] == ["pdserve"]:
                base = words[1:]
            elif words[:1] == ["tools"]:
                base = words
            else:
                continue
            # What is imported may itself be a module.
            yield ".".join(base), node.lineno
            for name in node.names:
                yield ".".join([*base, name.name]), node.lineno


def running_up(arrows: list[Arrow]) -> list[str]:
    """Arrows from one folder to one that stands above it, or to one that has no floor yet."""
    problems = []
    for arrow in arrows:
        source, target = arrow.source.split(".")[0], arrow.target.split(".")[0]
        homeless = [folder for folder in (source, target) if folder not in FLOORS]
        if homeless:
            problems.append(f"{arrow}: give {homeless[0]}/ a place in FLOORS")
        elif FLOORS.index(target) > FLOORS.index(source):
            problems.append(f"{arrow}, which runs up: {target}/ stands above {source}/")
    return problems


def circles(arrows: list[Arrow]) -> list[str]:
    """Return the arrows that lie on a cycle of modules."""
    targets: dict[str, set[str]] = {}
    for arrow in arrows:
        targets.setdefault(arrow.source, set()).add(arrow.target)

    def reaches(start: str, end: str) -> bool:
        seen, todo = {start}, [start]
        while todo:
            at = todo.pop()
            if at == end:
                return True
            new = targets.get(at, set()) - seen
            seen |= new
            todo += new
        return False

    return [f"{arrow}, in a circle" for arrow in arrows if reaches(arrow.target, arrow.source)]
