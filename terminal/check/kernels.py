"""Whether the CPU kernels can be used here, and whether they are built. Builds nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

from ...model_runner.cpu_engine.build import (
    ISA_VARIABLE,
    MODULE,
    PREBUILT,
    BuildError,
    choose_level,
    find_compiler,
    find_library,
    library_path,
)
from ...model_runner.cpu_engine.failed_build import FailedBuild
from .finding import Finding, ok, problem, warning

SLOW = "Without them PyTorch computes, several times slower."
BUILD = f"python -m {MODULE}"


def look_at_kernels() -> Iterator[Finding]:
    """Examine which level of the CPU kernels would be used, and whether their library is built and can be loaded."""
    try:
        level = choose_level()
    except BuildError as e:
        yield warning("kernels", str(e), SLOW)
        return
    chosen = f"{level.name} (as {ISA_VARIABLE} says)" if os.environ.get(ISA_VARIABLE) else level.name
    path = library_path(level)
    try:
        there = find_library(path)
    except BuildError as e:
        yield problem("kernels", f"{chosen}: {e}", SLOW)
        return
    if there is not None:
        try:
            ctypes.CDLL(str(there))
        except OSError as e:
            yield problem("kernels", f"{chosen}: {there} can't be loaded: {e}", f"Remove it and build anew: {BUILD}")
            return
        origin = "came with the package" if there.parent == PREBUILT else "built"
        yield ok("kernels", f"level {chosen}, {origin}: {there}")
        return
    compiler = find_compiler()
    if compiler is None:
        yield warning(
            "kernels",
            f"level {chosen}, but not built, and there is no C++ compiler",
            f"{SLOW} Install g++, or the wheel or container image, which carry the kernels.",
        )
    elif (output := FailedBuild(path).recall()) is not None:
        first = next(iter(output.strip().splitlines()), "no reason given")
        yield warning("kernels", f"level {chosen}, but {compiler} failed: {first}", f"{SLOW} To try again: {BUILD}")
    else:
        yield ok("kernels", f"level {chosen}, not built yet: the first start does it with {compiler}, or {BUILD} now")


def can_use_kernels() -> bool:
    """Return whether an instance started now would use the kernels, as far as is known without a build."""
    try:
        path = library_path(choose_level())
        is_there = find_library(path) is not None
    except BuildError:
        return False
    compiler = find_compiler()
    return is_there or (compiler is not None and FailedBuild(path).recall() is None)
