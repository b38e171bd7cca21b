"""What ``make test-sanitizers`` runs: the tests of the CPU kernels under sanitizers.

address: AddressSanitizer and UndefinedBehaviorSanitizer, over the kernels' tests and the fuzzers.
threads: ThreadSanitizer, over the team, the rank group and the sampler (``threads.cpp``).

A build is kept in ``build/sanitizers`` under the name that the product looks for, in a cache of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pdserve.model_runner.cpu_engine import build
from pdserve.model_runner.cpu_engine.build import SOURCES, IsaLevel, choose_level, find_compiler, library_path
from pdserve.runtime.private_cache import publish_sealed

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "sanitizers"
COMMON = ("-O1", "-g", "-fno-omit-frame-pointer")
ADDRESS = (*COMMON, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DPDSERVE_PARTS_APART")
THREADS = (*COMMON, "-fsanitize=thread")
KERNEL_TESTS = (
    *("attention", "conversion", "experts", "fuzz", "grid", "latent", "latent_engine", "layers", "linear", "memory"),
    *("ranks", "reference", "rotations", "sampling"),
)
FILES = (*(f"test_kernels_{name}.py" for name in KERNEL_TESTS), "test_gguf_blocks.py", "test_native_steps.py")
LIMITED = "test_after_a_pass_without_memory"
"""Name of the test that limits the address space: AddressSanitizer takes terabytes of it."""
OPTIONS = {
    # Python does not give back everything at its end. Allocations may fail: tests let them.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def main() -> int:
    """Run the parts that the command line names; return the worst exit status."""
    parser = argparse.ArgumentParser(prog="make test-sanitizers", description=__doc__)
    parser.add_argument("parts", nargs="*", default=["threads", "address"], help="threads, address; default: both")
    parser.add_argument("--files", nargs="+", default=FILES, help="files of tests for address")
    parser.add_argument("--workers", type=int, default=2, help="files of tests at a time")
    args = parser.parse_args()
    if (compiler := find_compiler()) is None:
        sys.exit("the sanitizers need a C++ compiler: install g++")
    parts = {"threads": lambda: check_threads(compiler), "address": lambda: check_address(compiler, args)}
    if unknown := set(args.parts) - set(parts):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    return max(parts[part]() for part in args.parts)


def check_threads(compiler: str) -> int:
    """Build and run ``threads.cpp``; return its exit status."""
    CACHE.mkdir(parents=True, exist_ok=True)
    program, sources = CACHE / "threads", [Path(__file__).with_name("threads.cpp")]
    sources += [SOURCES / name for name in ("sampling.cpp", "sampling_api.cpp")]
    flags = (*build.COMMON_FLAGS, *choose_level().flags, *THREADS, f"-I{SOURCES}")
    subprocess.run([compiler, *flags, *sources, "-o", program], check=True)
    return subprocess.run([program], env={**os.environ, **OPTIONS}, check=False).returncode


def check_address(compiler: str, args: argparse.Namespace) -> int:
    """Run tests on a library that is built for AddressSanitizer; return pytest's exit status."""
    # In the user's cache, servers would load it.
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    level = choose_level()
    made = build.build(with_flags(level, ADDRESS), name="sanitized")
    path = library_path(level)
    publish_sealed(Path(shutil.copy(made, made.with_name("made.so"))), path)
    # Libraries that wait for what a program links first; C++'s own, so that its exceptions are seen.
    preloaded = [library_of(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    tests = [f"tests/unit/model_runner/{name}" for name in args.files]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(args.workers)]
    command += ["--dist", "loadfile", "-k", f"not {LIMITED}"]
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(preloaded)}
    return subprocess.run([*command, *tests], env=environment, cwd=ROOT, check=False).returncode


def with_flags(level: IsaLevel, flags: tuple[str, ...]) -> IsaLevel:
    """Return the level with more of the compiler's flags, of which the last ones win."""
    return level._replace(flags=(*level.flags, *flags))


def library_of(compiler: str, name: str) -> str:
    """Return the path of one of the compiler's own libraries."""
    done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(done.stdout.strip()).resolve())


if __name__ == "__main__":
    sys.exit(main())
