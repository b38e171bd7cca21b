"""Prose in a Python file: docstrings, comments, and help texts of options and metrics."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

from .text import Kind, Text

# Strings are matched so that a "#" inside one does not look like a comment.
TOKENS = re.compile(
    r"(\"\"\"|''')(?:\\.|[^\\])*?\1|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)", re.DOTALL
)
PRAGMA = re.compile(r"#!|#\s*(noqa|type:|fmt:|ruff:|pragma|mypy:)")
METRIC_NAME = re.compile(r"[a-z]+(_[a-z0-9]+){2,}$")
HAS_HELP = re.compile(r"\bhelp=|\bdescription=|\"pdserve_")
HELP_KEYWORDS = ("help", "description")
NOUN_DECORATORS = {"property", "cached_property", "fixture", "setter", "overload"}
PARAMETER = re.compile(r"^(\w+)\n((?: +\S.*\n?)+)", re.MULTILINE)


def python_texts(source: str, tree: ast.Module | None = None) -> list[Text]:
    """Return the docstrings, comments and help texts in a Python file's ``source``.

    ``tree``: its syntax tree; None parses ``source``.
    """
    tree = tree or ast.parse(source)
    texts = [*_docstrings(tree), *_comments(source)]
    if HAS_HELP.search(source):
        texts += _help_texts(tree)
    return texts


def _docstrings(tree: ast.Module) -> Iterator[Text]:
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            for number, child in enumerate(getattr(node, name, None) or ()):
                if isinstance(child, ast.Expr):
                    if isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                        kind = _kind(node) if number == 0 and name == "body" else Kind.DOCSTRING
                        yield from _docstring(child, child.value.value, kind)
                elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                    todo.append(child)


def _docstring(node: ast.Expr, value: str, kind: Kind) -> Iterator[Text]:
    text = inspect.cleandoc(value)
    before, found, parameters = text.partition("Parameters\n----------\n")
    yield Text(node.lineno, kind, before)
    if found:
        first = node.lineno + before.count("\n") + 2
        for match in PARAMETER.finditer(parameters):
            line = first + parameters.count("\n", 0, match.start(2))
            yield Text(line, Kind.HELP, inspect.cleandoc(match[2]))


def _kind(node: ast.AST) -> Kind:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
        return Kind.DOCSTRING
    names = {_last_name(decorator) for decorator in node.decorator_list}
    return Kind.DOCSTRING if names & NOUN_DECORATORS else Kind.FUNCTION


def _last_name(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return ast.unparse(decorator).rpartition(".")[2]


def _comments(source: str) -> Iterator[Text]:
    """Yield the comments of a Python file. Comments on consecutive lines are yielded as one text."""
    held: list[str] = []
    first = column = at = 0
    line = 1
    for match in TOKENS.finditer(source):
        comment = match["comment"]
        if comment is None:
            continue
        line += source.count("\n", at, match.start())
        at = match.start()
        begin = source.rfind("\n", 0, match.start()) + 1
        alone = not source[begin : match.start()].strip()
        continues = bool(held) and alone and line == first + len(held) and match.start() - begin == column
        if held and not continues:
            yield Text(first, Kind.COMMENT, "\n".join(held))
            held = []
        if PRAGMA.match(comment):
            continue
        if not held:
            first, column = line, match.start() - begin if alone else -1
        held.append(comment.lstrip("#").removeprefix(" "))
    if held:
        yield Text(first, Kind.COMMENT, "\n".join(held))


def _help_texts(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            strings = [argument for argument in node.args if _is_string(argument)]
            is_metric = any(METRIC_NAME.match(ast.literal_eval(string)) for string in strings[:1])
            strings = strings[1:2] if is_metric else []
            strings += [word.value for word in node.keywords if word.arg in HELP_KEYWORDS and _is_string(word.value)]
            for string in strings:
                yield Text(string.lineno, Kind.HELP, ast.literal_eval(string))


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
