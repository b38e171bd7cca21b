"""Guards: branches on an optional part.

An *optional part* is a collaborator that an object gets at its construction and may lack. Its type is ``Part | None``,
and it is one of these:

* an attribute that ``__init__`` sets and no other method assigns;
* a field of a dataclass that is assigned nowhere in its room.

``Part`` is a first-party class with a public method. Messages, enums, named tuples, exceptions and dataclasses are
data, not parts. State that comes and goes is no part either.

A *guard* is an expression that asks whether a part is there. It counts in each room with an owner of a part of that
name; a leading underscore does not matter. Guards are:

* a comparison of the part with ``None``, be it an attribute or a local variable;
* the part alone as a condition: ``if self.tiers``, ``not tiers``, ``tiers and …``;
* ``isinstance`` of the part.

Tests for a null object count anywhere: ``isinstance(x, NoTiers)``, ``type(x) is NoTiers``, ``x is NO_TIERS``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from .classes import Class, Classes, Function
from .source import Module, Place

DATA = {"Struct", "NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag", "BaseModel", "TypedDict", "Exception"}
NULL_OBJECT = re.compile(r"(No|Null)[A-Z]\w*(?<!Error)$|(NO|NULL)_[A-Z_]+$")

Parts = dict[str, set[str]]
"""Rooms of the owners by name of the part."""


def optional_parts(classes: Classes) -> Parts:
    """Return the names of all optional parts, each with the top-level folders of the classes that own it."""
    parts: Parts = {}
    for owner in classes.all:
        for name in set(_parts_of(owner, classes)):
            parts.setdefault(name.lstrip("_"), set()).add(owner.module.room)
    return parts


def _parts_of(owner: Class, classes: Classes) -> Iterator[str]:
    def is_part(annotation: ast.expr | None) -> bool:
        return annotation is not None and _is_optional_part(annotation, owner.module, classes)

    if _is_dataclass(owner):
        fields = [item for item in owner.node.body if isinstance(item, ast.AnnAssign) and is_part(item.annotation)]
        assigned = classes.assigned_attributes(owner.module.room)
        yield from {ast.unparse(field.target) for field in fields} - assigned
    stores = [node.attr for node in ast.walk(owner.node) if isinstance(node, ast.Attribute) and _is_store(node)]
    for init in owner.node.body:
        if isinstance(init, Function) and init.name == "__init__":
            arguments = [*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs]
            given = {argument.arg for argument in arguments if is_part(argument.annotation)}
            for name, value, annotation in _assignments(init):
                from_argument = isinstance(value, ast.Name) and value.id in given
                if stores.count(name) == 1 and (from_argument or is_part(annotation)):
                    yield name


def _is_store(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _assignments(init: Function) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    """Yield the name, value and annotation of each attribute that ``init`` sets. The annotation may be None."""
    for node in ast.walk(init):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        annotation = None
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs, annotation = [(node.target, node.value)], node.annotation
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
        for target, value in pairs:
            if isinstance(target, ast.Attribute) and _is_store(target):
                yield target.attr, value, annotation


def _is_optional_part(annotation: ast.expr, user: Module, classes: Classes) -> bool:
    names = [name.strip("\"' ").partition("[")[0] for name in ast.unparse(annotation).strip("\"'").split("|")]
    found = [classes.find(name.rpartition(".")[2], user) for name in names]
    return "None" in names and any(part is not None and _is_collaborator(part, classes) for part in found)


def _is_collaborator(part: Class, classes: Classes) -> bool:
    lineage = classes.lineage(part)
    data = any(_is_dataclass(each) or DATA & {each.node.name, *each.base_names} for each in lineage)
    return not data and bool(classes.public_methods(part))


def _is_dataclass(found: Class) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in found.node.decorator_list)


def guards(modules: Iterable[Module], parts: Parts) -> Iterator[tuple[str, Place]]:
    """Yield each guard, with the name of its part (or of the null object that it asks for) and its place."""
    for module in modules:
        here = {name for name, rooms in parts.items() if module.room in rooms}
        found = {(test.lineno, test.col_offset): (name, test) for name, test in _guards_in(module.nodes, here)}
        for (line, _), (name, test) in sorted(found.items(), key=lambda item: item[0]):
            yield name, Place(module.path, line, ast.unparse(test))


def _guards_in(nodes: Iterable[ast.AST], parts: set[str]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
                yield from ((name, node) for side in sides if (name := _name(side)) in parts)
            yield from ((name, node) for side in sides if _is_null_object(name := _name(side)))
        elif isinstance(node, ast.Call) and _name(node.func) == "isinstance" and len(node.args) == 2:
            tested = _name(node.args[0])
            kinds = [_name(kind) for kind in ast.walk(node.args[1]) if isinstance(kind, ast.Name | ast.Attribute)]
            null = [kind for kind in kinds if _is_null_object(kind)]
            if tested in parts or null:
                yield (tested if tested in parts else null[0]), node
        else:
            yield from ((name, test) for test in _conditions(node) if (name := _name(test)) in parts)


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.comprehension):
        return node.ifs
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    return node.id.lstrip("_") if isinstance(node, ast.Name) else ""


def _is_null_object(name: str) -> bool:
    return NULL_OBJECT.match(name) is not None
