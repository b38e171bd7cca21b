"""Reads the product's modules and their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

NOT_ROOMS = {"tests", "docs", "docker", "tools", "build", "dist"}


@dataclass(frozen=True)
class Module:
    """A Python file of a room."""

    path: str
    """Relative to the repository: "scheduler/policies/base.py"."""
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the module's syntax tree."""
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        """Number of lines of the file."""
        return len(self.text.splitlines())

    @property
    def room(self) -> str:
        """Name of the top-level folder that the file is in."""
        return self.path.split("/")[0]

    @property
    def name(self) -> str:
        """Dotted name without ``pdserve``, such as "scheduler.policies.base". A package has its folder's name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> list[str]:
        """Names of the folders that the file is in, the outermost first."""
        return self.path.split("/")[:-1]


class Place(NamedTuple):
    """A line of a file, and what is there."""

    path: str
    line: int
    what: str
    size: int = 1
    """Lines or methods, where the figure is a size."""

    @property
    def room(self) -> str:
        """Name of the top-level folder that the file is in."""
        return self.path.split("/")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def read_product(root: Path) -> list[Module]:
    """Read and parse every Python file of the product's top-level packages, in the order of their paths."""
    rooms = [init.parent for init in root.glob("*/__init__.py") if init.parent.name not in NOT_ROOMS]
    return [_read(root, file) for room in sorted(rooms) for file in sorted(room.rglob("*.py"))]


def read_tests(root: Path) -> list[Module]:
    """Read and parse every Python file below ``tests/``, in the order of their paths."""
    return [_read(root, file) for file in sorted((root / "tests").rglob("*.py"))]


def _read(root: Path, file: Path) -> Module:
    text = file.read_text(encoding="utf-8")
    return Module(file.relative_to(root).as_posix(), text, ast.parse(text))


def imports(module: Module) -> Iterator[str]:
    """Yield the dotted names of first-party modules, or of what is in them, that a module imports anywhere."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (name.name.removeprefix("pdserve.") for name in node.names if name.name.startswith("pdserve."))
        elif isinstance(node, ast.ImportFrom):
            words = node.module.split(".") if node.module else []
            if node.level:
                base = [*module.package[: len(module.package) - node.level + 1], *words]
            elif words[:1] == ["pdserve"]:
                base = words[1:]
            else:
                continue
            yield from (".".join([*base, name.name]) for name in node.names)
