"""Sizes of classes and functions, and class names with two meanings.

The width of a class is the number of its public methods and properties, those of first-party base classes included.
A base class is looked up by name: in the same file, then in the same room, then where the name is unique.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .source import Module, Place

MAX_CLASS_LINES = 300
MAX_FUNCTION_LINES = 60
MEASURED_APART = {"benchmark"}
"""Rooms that do not count for names with two meanings: they are programs of their own."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Class(NamedTuple):
    """A class and the file that defines it."""

    module: Module
    node: ast.ClassDef

    @property
    def base_names(self) -> list[str]:
        """Last words of the base classes' names, without type arguments."""
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in self.node.bases]
        return [ast.unparse(base).rpartition(".")[2] for base in bases]

    @property
    def own_public(self) -> set[str]:
        """Names of public methods and properties that the class itself defines."""
        return {item.name for item in self.node.body if isinstance(item, Function) and item.name[0] != "_"}

    def place(self, size: int) -> Place:
        """Return the file and line of the class, with ``size`` as the figure to show."""
        return Place(self.module.path, self.node.lineno, f"{self.node.name}, {size}", size)


class Classes:
    """All classes of the product."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = list(modules)
        self._assigned: dict[str, set[str]] = {}
        self.all = [
            Class(module, node) for module in self._modules for node in module.nodes if isinstance(node, ast.ClassDef)
        ]
        self._by_name: dict[str, list[Class]] = {}
        for found in self.all:
            self._by_name.setdefault(found.node.name, []).append(found)

    def assigned_attributes(self, room: str) -> set[str]:
        """Return the names of all attributes that code in the folder ``room`` assigns, on any object."""
        if room not in self._assigned:
            nodes = [node for module in self._modules if module.room == room for node in module.nodes]
            stores = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
            self._assigned[room] = {node.attr for node in stores}
        return self._assigned[room]

    def find(self, name: str, user: Module) -> Class | None:
        """Return the class that ``name`` means in the module ``user``. None: a library's class, or an ambiguous name.

        The name is looked up in the same file, then in the same top-level folder, then everywhere.
        """
        named = self._by_name.get(name, [])
        for chosen in (
            [found for found in named if found.module.path == user.path],
            [found for found in named if found.module.room == user.room],
            named,
        ):
            if len(chosen) == 1:
                return chosen[0]
        return None

    def lineage(self, found: Class) -> list[Class]:
        """Return a class and all its direct and indirect base classes that are defined in this repository."""
        line: list[Class] = []
        todo = [found]
        while todo:
            at = todo.pop()
            if at not in line:
                line.append(at)
                todo += [base for name in at.base_names if (base := self.find(name, at.module))]
        return line

    def public_methods(self, found: Class) -> set[str]:
        """Return the names of a class's public methods and properties, inherited ones included."""
        return {name for each in self.lineage(found) for name in each.own_public}

    def widths(self) -> Iterator[Place]:
        """Yield the place of every class with its width, the number of its public methods and properties."""
        for found in self.all:
            yield found.place(len(self.public_methods(found)))

    def large(self) -> Iterator[Place]:
        """Yield the place of each class of more than ``MAX_CLASS_LINES`` lines, with their number."""
        for found in self.all:
            if (size := length(found.node)) > MAX_CLASS_LINES:
                yield found.place(size)

    def double_names(self) -> dict[str, list[Place]]:
        """Return the class names that several classes have, each with the places of these classes.

        Classes in ``MEASURED_APART`` folders don't count.
        """
        counted = {
            name: [found.place(1) for found in named if found.module.room not in MEASURED_APART]
            for name, named in sorted(self._by_name.items())
        }
        return {name: places for name, places in counted.items() if len(places) > 1}


def length(node: ast.stmt) -> int:
    """Return the number of lines of a class or function, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def long_functions(module: Module) -> Iterator[Place]:
    """Yield the place of each function of more than ``MAX_FUNCTION_LINES`` lines, with their number."""
    for node in module.nodes:
        if isinstance(node, Function) and (size := length(node)) > MAX_FUNCTION_LINES:
            yield Place(module.path, node.lineno, f"{node.name}, {size}", size)


def asserts_of_presence(module: Module) -> Iterator[Place]:
    """Yield the place of each ``assert x is not None`` in a module."""
    for node in module.nodes:
        if isinstance(node, ast.Assert) and "is not None" in (test := ast.unparse(node.test)):
            yield Place(module.path, node.lineno, test)
