"""Triton's interpreter, in half of its time."""

from __future__ import annotations

import inspect
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


def remember_builtins() -> None:
    """Let the interpreter list the builtins of a module once.

    It replaces them at each call of a kernel's function. Each time it looks at every member of ``triton.language``,
    which takes half of the time that small kernels need.
    """
    names: dict[Any, list[str]] = {}

    def replace(package: Any, *rest: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        # A launch replaces all of them and restores all: a function of another kernel finds them replaced.
        if names[package] and is_builtin(getattr(package, names[package][0])):
            for name in names[package]:
                interpreter._patch_attr(package, name, getattr(package, name), *rest)

    interpreter._patch_builtin = replace
