"""Builds the CPU kernels: one shared library, compiled once for what this processor can do, kept in the user's cache.

``python -m pdserve.model_runner.kernels.build`` builds it ahead of time (``make setup`` does). ``--all`` builds all
levels into the package, from where they are loaded first: wheels and container images carry them and need no compiler.
The library's name holds a hash of everything it is made from, so that one of other sources or flags is never loaded by
mistake. A build that failed is remembered beside the cache, see ``failed_build.py``.

``PDSERVE_CPU_ISA=avx2`` chooses the code for lesser processors on one that could do more: so it is tested and measured.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ..device import cpu_flags
from .failed_build import FailedBuild

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
PREBUILT = Path(__file__).parent / "prebuilt"
ARCHITECTURE = "x86_64"
MODULE = "pdserve.model_runner.kernels.build"
COMPILERS = ("g++", "clang++", "c++")
COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    # Fused multiply-adds are what we want; NaN and infinity must keep their meaning, so nothing else is relaxed.
    *("-ffp-contract=fast", "-fno-math-errno"),
)
TIMEOUT = 300.0
ISA_VARIABLE = "PDSERVE_CPU_ISA"
"""A variable and not an option: a process loads one library, for whichever tool or test asks first."""


class Level(NamedTuple):
    """An instruction set to compile for: what /proc/cpuinfo calls its parts, and the compiler's flags."""

    name: str
    cpu_flags: frozenset[str]
    flags: tuple[str, ...]
    multiplies_pairs: bool
    """Whether there are dot products of pairs of bfloat16."""


LEVELS = (
    Level(
        "avx512",
        frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "fma", "f16c")),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16", "-mfma", "-mf16c"),
        multiplies_pairs=True,
    ),
    Level("avx2", frozenset(("avx2", "fma", "f16c")), ("-mavx2", "-mfma", "-mf16c"), multiplies_pairs=False),
)


class BuildError(Exception):
    """The kernels can't be built here; the message says why and what to do."""


def best_level() -> Level | None:
    """The best level that this processor has; None where the kernels can't run at all."""
    flags = cpu_flags()
    return next((level for level in LEVELS if level.cpu_flags <= flags), None)


def choose_level() -> Level:
    """The level that ``PDSERVE_CPU_ISA`` names, else the best; raises ``BuildError`` where this processor lacks it."""
    if platform.machine() != ARCHITECTURE:
        raise BuildError(f"the CPU kernels are written for {ARCHITECTURE}, and this processor is {platform.machine()}")
    best, name = best_level(), os.environ.get(ISA_VARIABLE, "")
    if best is None:
        raise BuildError("the CPU kernels need a processor with AVX2 or AVX-512")
    if not name:
        return best
    here = {level.name: level for level in LEVELS if level.cpu_flags <= cpu_flags()}
    if name not in here:
        raise BuildError(f"{ISA_VARIABLE}={name}: the CPU kernels can be had here for {', '.join(here)}")
    return here[name]


def library_path(level: Level, sources: Path = SOURCES, name: str = "kernels") -> Path:
    """Where the library for ``level`` is, or would be."""
    digest = hashlib.sha256(" ".join((*COMMON_FLAGS, *level.flags)).encode())
    for file in sorted(sources.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return _cache_folder() / f"{name}-{level.name}-{digest.hexdigest()[:16]}.so"


def build(level: Level, sources: Path = SOURCES, name: str = "kernels", *, retry: bool = False) -> Path:
    """The path of the library for ``level``, built if it isn't there yet. Raises ``BuildError``.

    Processes that want it at the same time wait for the first of them. What failed is not tried again by the same
    compiler, unless ``retry``.
    """
    path = library_path(level, sources, name)
    for there in (PREBUILT / path.name, path):
        if there.is_file():
            return there
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                _try_to_compile(level, sources, path, retry)
    except OSError as e:
        raise BuildError(f"the CPU kernels can't be kept in {path.parent}: {e}") from e
    return path


def build_all(folder: Path = PREBUILT) -> None:
    """Fill ``folder`` with the libraries of all levels, and nothing else. Raises ``BuildError``."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {library_path(level).name for level in LEVELS}
    for old in folder.glob("*.so"):
        if old.name not in names:
            old.unlink()
    for level in LEVELS:
        path = build(level, retry=True)
        if path.parent != folder:
            shutil.copy(path, folder / f"{path.name}.new")
            os.replace(folder / f"{path.name}.new", folder / path.name)


def _try_to_compile(level: Level, sources: Path, path: Path, retry: bool) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"there is no C++ compiler ({', '.join(COMPILERS)}) to build the CPU kernels with")
    failed = FailedBuild(path, compiler)
    if not retry and (message := failed.recall()) is not None:
        raise BuildError(f"{message}\nIt is not tried again; python -m {MODULE} tries.")
    try:
        _compile(compiler, level, sources, path)
    except BuildError as e:
        failed.remember(str(e))
        raise
    failed.forget()


def _compile(compiler: str, level: Level, folder_of_sources: Path, path: Path) -> None:
    log.info("building the CPU kernels (%s) with %s; this happens once and takes half a minute", level.name, compiler)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        sources = [str(file) for file in sorted(folder_of_sources.glob("*.cpp"))]
        command = [compiler, *COMMON_FLAGS, *level.flags, *sources, "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        except subprocess.TimeoutExpired as e:
            raise BuildError(f"{compiler} did not finish the CPU kernels within {TIMEOUT:.0f} s") from e
        if done.returncode != 0:
            raise BuildError(f"{compiler} could not build the CPU kernels:\n{done.stderr[-4000:]}")
        os.replace(output, path)
    log.info("built the CPU kernels in %.1f s: %s", time.monotonic() - begin, path)


def _cache_folder() -> Path:
    """The XDG base directory specification's place for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "pdserve"


def main() -> int:
    """Build for this processor; 0 also where it has no kernels or no compiler, because the server runs without.

    With ``--all``, build for all processors; 1 where that fails, because what would be shipped is not there.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="build for all levels, into the package")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if args.all:
            build_all()
            return 0
    except BuildError as e:
        log.error("%s", e)
        return 1
    try:
        build(choose_level(), retry=True)
    except BuildError as e:
        log.warning("%s\nThe torch reference will be used.", e)
    return 0


if __name__ == "__main__":
    sys.exit(main())
