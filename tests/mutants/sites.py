"""Places in the product's Python code where a mutant can be planted, and the text that plants it.

A mutant replaces one expression or removes one statement. All drawn mutants are planted in one copy of the tree; each
is behind a switch, so the tree is built and its coverage is recorded once. Line numbers stay as they are.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_PRODUCT = {"tests", "docs", "docker", "tools"}
NOT_RUN_BY_PYTHON = {f"model_runner/{concept}/triton" for concept in ("attention", "kv", "ops", "sampling")}
"""Triton compiles the text of these functions, where a switch can't be."""
SWITCH = '__import__("mutant_switch").is_on({})'

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
UNTESTED_CALLS = {"debug", "info", "warning", "error", "exception", "print", "log"}
"""Names of functions with calls that are not removed: most tests rightly don't look at log lines."""


@dataclass(frozen=True)
class Site:
    """One mutant. ``start`` and ``end``: (line from 1, UTF-8 byte offset) of the text that ``planted`` replaces."""

    path: str
    kind: str
    start: tuple[int, int]
    end: tuple[int, int]
    before: str
    after: str
    is_statement: bool = False

    @property
    def room(self) -> str:
        """The top-level folder."""
        return self.path.split("/")[0]

    @property
    def key(self) -> str:
        """Name of the mutant in the results."""
        return f"{self.path}:{self.start[0]}:{self.start[1]} {self.kind}: {self.after}"

    def planted(self, number: int) -> str:
        """Return the text with the mutant behind switch ``number``."""
        switch = SWITCH.format(number)
        if self.is_statement:
            return f"if not {switch}: {self.before}"
        return f"({self.after} if {switch} else {self.before})"


def product_files(root: Path = ROOT) -> list[Path]:
    """Python files of the product, in a fixed order."""
    files = sorted(path.parent for path in root.glob("*/__init__.py") if path.parent.name not in NOT_PRODUCT)
    found = [path for folder in files for path in sorted(folder.rglob("*.py"))]
    return [path for path in found if path.parent.relative_to(root).as_posix() not in NOT_RUN_BY_PYTHON]


class _Finder(ast.NodeVisitor):
    """Collects the sites of one file."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.lines = source.encode().splitlines(keepends=True)
        self.sites: list[Site] = []

    def text(self, node: ast.AST) -> str:
        """Source text of ``node``."""
        first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
        begin, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        if first == last:
            return self.lines[first][begin:end].decode()
        middle = self.lines[first + 1 : last]
        return b"".join([self.lines[first][begin:], *middle, self.lines[last][:end]]).decode()

    def add(self, node: ast.expr | ast.stmt, kind: str, after: str) -> None:
        """Note a site that replaces ``node``."""
        start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        self.sites.append(Site(self.path, kind, start, end, self.text(node), after, isinstance(node, ast.stmt)))

    # --- what is left alone: annotations, texts, patterns, assertions ---

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings: their parts have no positions before Python 3.12."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip: an assertion that holds can be changed without effect."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Look at the value, not at the type."""
        if node.value is not None:
            self.visit(node.value)

    def visit_match_case(self, node: ast.match_case) -> None:
        """Look at the guard and the body, not at the pattern."""
        for part in (*([node.guard] if node.guard else []), *node.body):
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Look at defaults and the body, not at decorators and types."""
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Look at the body alone."""
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition, unless it is about types or the main module."""
        if self.text(node.test).startswith(("TYPE_CHECKING", "__name__", "sys.version")):
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """Negate the condition."""
        if not isinstance(node.test, ast.Constant):
            self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition."""
        self.negate(node.test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        """Note the negation of a condition."""
        self.add(test, "negated condition", f"not ({self.text(test)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        """Replace the first operator by its neighbour."""
        other = COMPARISONS[type(node.ops[0])]
        self.add(node, "comparison", ast.unparse(ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Replace ``and`` by ``or`` and the other way round."""
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, "and/or", ast.unparse(ast.BoolOp(other, node.values)))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Replace the operator of numbers."""
        texts = any(isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in _sides(node))
        if type(node.op) in OPERATORS and not texts:
            self.add(node, "arithmetic", ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change a number or a truth value."""
        if isinstance(node.value, bool):
            self.add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, "constant", str(node.value + 1))
        elif isinstance(node.value, float):
            self.add(node, "constant", repr(node.value * 2 + 1e-3))

    def visit_Slice(self, node: ast.Slice) -> None:
        """Move a bound by one."""
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self.add(bound, "off by one", f"{self.text(bound)} + 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap the first two arguments; move the end of a range by one."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        plain = not any(isinstance(argument, ast.Starred) for argument in node.args)
        if name == "range" and plain and not isinstance(node.args[-1], ast.Constant):
            self.add(node.args[-1], "off by one", f"{self.text(node.args[-1])} - 1")
        elif plain and len(node.args) > 1 and name not in ("isinstance", "getattr", "setattr", "hasattr", "cast"):
            first, second, *rest = node.args
            if ast.unparse(first) != ast.unparse(second):
                swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
                self.add(node, "swapped arguments", ast.unparse(swapped))
        self.generic_visit(node)

    # --- statements that can be removed ---

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call."""
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            called = value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name not in UNTESTED_CALLS:
                self.add(node, "removed statement", "pass")
                self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Remove an assignment to a part of something; one to a name would leave it undefined."""
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.add(node, "removed statement", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Remove the change."""
        self.add(node, "removed statement", "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        """Remove the deletion."""
        self.add(node, "removed statement", "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        """Remove it; its text is left alone."""
        self.add(node, "removed statement", "pass")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _sides(node: ast.BinOp) -> tuple[ast.expr, ast.expr]:
    return node.left, node.right


def find_sites(path: str, source: str) -> list[Site]:
    """Return all sites of a file with the text ``source``."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    starts = {}  # statements that share their line with another can't get an ``if`` of their own
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            line = finder.lines[node.lineno - 1][: node.col_offset]
            starts[node.lineno, node.col_offset] = not line.strip()
    return [site for site in finder.sites if not site.is_statement or starts[site.start]]


def draw(sites: Sequence[Site], count: int, seed: int) -> list[Site]:
    """Draw ``count`` sites, equally many of each room, none inside another. The order is that of the draw."""
    rng = random.Random(seed)
    rooms: dict[str, list[Site]] = defaultdict(list)
    for site in sites:
        rooms[site.room].append(site)
    for found in rooms.values():
        rng.shuffle(found)
    taken: list[Site] = []
    while len(taken) < count and any(rooms.values()):
        for room in sorted(rooms):
            while rooms[room] and len(taken) < count:
                site = rooms[room].pop()
                if not any(_overlap(site, other) for other in taken):
                    taken.append(site)
                    break
    return taken


def _overlap(one: Site, other: Site) -> bool:
    return one.path == other.path and one.start <= other.end and other.start <= one.end


def plant(source: str, sites: dict[int, Site]) -> str:
    """Return ``source`` with the mutants of these numbers behind their switches."""
    lines = source.encode().splitlines(keepends=True)
    for number, site in sorted(sites.items(), key=lambda item: item[1].start, reverse=True):
        (first, begin), (last, end) = site.start, site.end
        new = lines[first - 1][:begin] + site.planted(number).encode() + lines[last - 1][end:]
        lines[first - 1 : last] = new.splitlines(keepends=True)
    return b"".join(lines).decode()


def all_sites(root: Path = ROOT) -> Iterator[Site]:
    """Sites of the whole product."""
    for path in product_files(root):
        yield from find_sites(path.relative_to(root).as_posix(), path.read_text())
