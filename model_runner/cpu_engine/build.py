"""Builds the CPU kernels: one shared library, compiled once for what this processor can do, kept in the user's cache.

``python -m pdserve.model_runner.cpu_engine.build`` builds it ahead of time (``make setup`` does). ``--all`` builds all
levels into the package, from where they are loaded first: wheels and container images carry them and need no compiler.
The library's name holds a hash of its sources and flags, so that a library of other sources is never loaded by mistake.
In the cache it also holds a hash of the compiler: a library does not outlive a compiler that was replaced. A build that
failed is remembered in the cache, see ``failed_build.py``.

``PDSERVE_CPU_ISA=avx2`` (or another of ``LEVELS``) chooses the code for lesser processors on one that could do more: so
it is tested and measured.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import argparse
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from ...runtime.file_lock import lock_within, try_lock
from ...runtime.machine.processor import cpu_flags
from ...runtime.private_cache import cache_folder, is_there, is_whole, publish_sealed
from ...runtime.progress import ProgressLog
from ...runtime.trusted_path import make_private_folder
from .failed_build import FailedBuild

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
ARCHITECTURE = "x86_64"
MODULE = "pdserve.model_runner.cpu_engine.build"
COMPILERS = ("g++", "clang++", "c++")
COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden"),
    # Fused multiply-adds are what we want; NaN and infinity must keep their meaning, so nothing else is relaxed.
    *("-ffp-contract=fast", "-fno-math-errno"),
)
TIMEOUT = 300.0
BUILD_PREFIX = "build-"
"""Beginning of the names of the folders of builds that are not done."""
"""Seconds that the compiler may take for a file."""
WAIT_SECONDS = 240.0
"""Seconds to wait for another process that builds. The default --startup-timeout is longer and names no reason."""
ISA_VARIABLE = "PDSERVE_CPU_ISA"
"""A variable and not an option: a process loads one library, for whichever tool or test asks first."""


class IsaLevel(NamedTuple):
    """An instruction set to compile for: what /proc/cpuinfo calls its parts, and the compiler's flags."""

    name: str
    cpu_flags: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = IsaLevel("avx2", frozenset(("avx2", "fma", "f16c")), ("-mavx2", "-mfma", "-mf16c"))
# Since Skylake-X. What has AVX-512 has all of AVX2.
_AVX512 = IsaLevel(
    "avx512",
    _AVX2.cpu_flags | {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    (*_AVX2.flags, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
)
# Since Cascade Lake: dot products of bytes, for quantised weights.
_AVX512_VNNI = IsaLevel("avx512vnni", _AVX512.cpu_flags | {"avx512_vnni"}, (*_AVX512.flags, "-mavx512vnni"))
# Since Cooper Lake, Sapphire Rapids and Zen 4.
_AVX512_BF16 = IsaLevel("avx512bf16", _AVX512_VNNI.cpu_flags | {"avx512_bf16"}, (*_AVX512_VNNI.flags, "-mavx512bf16"))
LEVELS = (_AVX512_BF16, _AVX512_VNNI, _AVX512, _AVX2)
"""Best first. Each can do all that those after it can."""


class BuildError(Exception):
    """The kernels can't be built here; the message says why and what to do."""


def levels_here() -> tuple[IsaLevel, ...]:
    """Return the instruction-set levels that this processor can run, best first; empty if the kernels can't run."""
    flags = cpu_flags()
    return tuple(level for level in LEVELS if level.cpu_flags <= flags)


def choose_level() -> IsaLevel:
    """Return the instruction-set level that ``PDSERVE_CPU_ISA`` names, or by default this processor's best.

    Raises ``BuildError`` if this processor lacks it, or can't run the kernels at all.
    """
    if platform.machine() != ARCHITECTURE:
        raise BuildError(f"the CPU kernels are written for {ARCHITECTURE}, and this processor is {platform.machine()}")
    here, name = {level.name: level for level in levels_here()}, os.environ.get(ISA_VARIABLE, "")
    if not here:
        raise BuildError("the CPU kernels need a processor with AVX2 or AVX-512")
    if not name:
        return next(iter(here.values()))
    if name not in here:
        raise BuildError(f"{ISA_VARIABLE}={name}: the CPU kernels can be had here for {', '.join(here)}")
    return here[name]


def library_path(level: IsaLevel, sources: Path = SOURCES, name: str = "kernels") -> Path:
    """Return the path that the library for ``level`` has in the user's cache, whether or not it is there.

    It depends on the sources, the flags and the compiler. Without a compiler it is the newest library of the same
    sources and flags that any compiler made.
    """
    digest = hashlib.sha256(" ".join((*COMMON_FLAGS, *level.flags)).encode())
    for file in sorted(filter(Path.is_file, sources.rglob("*"))):
        digest.update(str(file.relative_to(sources)).encode() + file.read_bytes())
    folder, stem = cache_folder(), f"{name}-{level.name}-{digest.hexdigest()[:16]}"
    if (compiler := find_compiler()) is not None:
        return folder / f"{stem}-{_identity(compiler)}.so"
    made = folder.glob(f"{stem}-*.so")
    return max(made, key=lambda path: path.lstat().st_mtime_ns, default=folder / f"{stem}-none.so")


def prebuilt_name(path: Path) -> str:
    """Return the file name in the package of the library with this ``library_path``; it leaves out the compiler."""
    return f"{path.stem.rpartition('-')[0]}.so"


def find_library(path: Path) -> Path | None:
    """Return the library that came with the package, or else the one in the cache at ``path`` (a ``library_path``).

    None: neither exists, or the cached one was damaged after it was built. Raises ``BuildError`` if another user owns
    or may write the cached one or its folder: its code would run in this process.
    """
    prebuilt = PREBUILT / prebuilt_name(path)
    if prebuilt.is_file():
        return prebuilt
    try:
        return path if is_there(path) and is_whole(path) else None
    except PermissionError as e:
        raise BuildError(f"{e.filename} is not used: {e.strerror}; or remove it, and it is built again") from e


def find_compiler() -> str | None:
    """Return the path of the compiler that builds the kernels, or None if there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _identity(compiler: str) -> str:
    """Return a hash that differs between compilers and between versions of one, without running the compiler.

    It is of the file's path, size and time of change.
    """
    status = os.stat(compiler)
    told = f"{os.path.realpath(compiler)} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def build(level: IsaLevel, sources: Path = SOURCES, name: str = "kernels", *, retry: bool = False) -> Path:
    """Return the path of the library for ``level``, after building it if it isn't there yet. Raises ``BuildError``.

    Processes that want it at the same time wait for the first of them. A failed build is not tried again with the same
    compiler, unless ``retry``.
    """
    path = library_path(level, sources, name)
    if (there := find_library(path)) is not None:
        return there
    try:
        make_private_folder(path.parent)
        with (path.parent / "lock").open("w") as lock:
            _wait_for(lock)
            if find_library(path) is None:
                _try_to_compile(level, sources, path, retry)
    except OSError as e:
        raise BuildError(f"the CPU kernels can't be kept in {path.parent}: {e}") from e
    return path


def build_all(folder: Path = PREBUILT) -> None:
    """Put the libraries of all instruction-set levels into ``folder``, and remove all other ``.so`` files there.

    Other kinds of files stay. A library is compiled only if neither the package nor the user's cache has it. Raises
    ``BuildError``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places = {level: folder / prebuilt_name(library_path(level)) for level in LEVELS}
    for old in set(folder.glob("*.so")) - set(places.values()):
        old.unlink()
    for level, place in places.items():
        path = build(level, retry=True)
        if path != place:
            shutil.copy(path, place.with_suffix(".new"))
            os.replace(place.with_suffix(".new"), place)


def _wait_for(lock: IO[str]) -> None:
    if try_lock(lock.fileno()):
        return
    log.info("another process is building the CPU kernels; waiting for it")
    if not lock_within(WAIT_SECONDS, lock.fileno()):
        raise BuildError(
            f"another process has been building the CPU kernels for {WAIT_SECONDS:.0f} s (fuser {lock.name} names it); "
            "start again when it is done, or end it if it hangs"
        )


def _try_to_compile(level: IsaLevel, sources: Path, path: Path, retry: bool) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"there is no C++ compiler ({', '.join(COMPILERS)}) to build the CPU kernels with")
    failed = FailedBuild(path)
    if not retry and (message := failed.recall()) is not None:
        raise BuildError(f"{message}\nIt is not tried again; python -m {MODULE} tries.")
    try:
        _compile(compiler, level, sources, path)
    except BuildError as e:
        failed.remember(str(e))
        raise
    failed.forget()


def _compile(compiler: str, level: IsaLevel, folder_of_sources: Path, path: Path) -> None:
    """Compile each source file by itself, on all allowed cores, link them to a library, and publish it at ``path``.

    Raises ``BuildError``.
    """
    log.info("building the CPU kernels (%s) with %s; this happens once and takes half a minute", level.name, compiler)
    begin = time.monotonic()
    sources = sorted(folder_of_sources.rglob("*.cpp"))
    flags = (*COMMON_FLAGS, *level.flags)
    _remove_abandoned(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILD_PREFIX) as folder:
        progress = ProgressLog(log, "building the CPU kernels", len(sources) + 1)
        objects = [Path(folder) / f"{i}-{source.stem}.o" for i, source in enumerate(sources)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            commands = ((compiler, *flags, "-c", source, "-o", o) for source, o in zip(sources, objects, strict=True))
            for _ in pool.map(partial(_run, folder), commands):
                progress.advance(1)
        output = Path(folder) / path.name
        _run(folder, (compiler, *flags, "-shared", *objects, "-o", output))
        publish_sealed(output, path)
    log.info("built the CPU kernels in %.1f s: %s", time.monotonic() - begin, path)


def _remove_abandoned(folder: Path) -> None:
    """Remove what builds have left that were ended before they were done, such as by a signal."""
    oldest = time.time() - 2 * TIMEOUT
    for left in folder.glob(f"{BUILD_PREFIX}*"):
        if left.lstat().st_mtime < oldest:
            shutil.rmtree(left, ignore_errors=True)


def _run(folder: str, command: tuple[str | Path, ...]) -> None:
    """Run a compiler, with its temporary files in ``folder``. Raises ``BuildError``."""
    env = {**os.environ, "TMPDIR": folder}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=env)
    except subprocess.TimeoutExpired as e:
        raise BuildError(f"{command[0]} did not finish the CPU kernels within {TIMEOUT:.0f} s") from e
    if done.returncode != 0:
        raise BuildError(f"{command[0]} could not build the CPU kernels:\n{done.stderr[-4000:]}")


def main() -> int:
    """Build the library for this processor, or for all levels with ``--all``, and return the exit code.

    It is 0 even if this processor has no kernels or no compiler, because the server runs without. With ``--all`` it is
    1 on failure, because the libraries to be shipped are missing.
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
        for line in f"{e}\nThe torch reference will be used.".splitlines():
            log.warning("%s", line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
