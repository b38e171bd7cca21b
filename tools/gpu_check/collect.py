"""Collects what ``make gpu-check`` needs on a machine without a network, and prints its size.

    python -P -m tools.gpu_check.collect DIR

Run it where pdserve is installed and pip reaches an index. It fills DIR with wheels for Python 3.12 on x86-64 and with
``tokenizer.gguf``. The machine with the GPU is given DIR as ``--wheels``. Left out is what a machine with PyTorch for
CUDA has (``ON_THE_MACHINE``). FlashInfer is left out as well: it is too large to take along.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pdserve.runtime.python import python_command

from .install import needed
from .tokenizer_file import TOKENIZER_FILE, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 64 << 20
"""Bytes that may be taken along; the wheels themselves need not be unpacked before they are installed."""
ON_THE_MACHINE = (
    *("torch", "triton", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock"),
    *("typing-extensions", "setuptools", "numpy", "transformers", "tokenizers", "safetensors", "regex"),
    *("huggingface-hub", "hf-xet", "tqdm", "pyyaml", "packaging"),
)
"""Packages of every machine with PyTorch and transformers. Other versions of them may need other packages beside
these, so rather a wheel too many is taken along. Only wheels of missing packages are installed.
"""
PYTHON = "3.12"
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(35, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1")
"""Platforms of a machine with glibc 2.35, the newest first. pip matches each of them exactly."""
MARKERS = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": ""}
"""What markers of requirements are judged by, beside the properties of this machine."""


def main() -> int:
    """Download the wheels and write the tokenizer's file into the folder. Return the exit code.

    It is 1 if something can't be had, or if all of it is larger than may be taken along.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--have", type=Path, help="file with names of packages that the machine has, too; one a line")
    options = parser.parse_args()
    have = [] if options.have is None else options.have.read_text().split()
    options.folder.mkdir(parents=True, exist_ok=True)
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in to_collect(have)]
    # A wheel of another version would be installed instead.
    for old in options.folder.glob("*.whl"):
        old.unlink()
    if _download(pins, options.folder):
        return 1
    write_tokenizer(options.folder / TOKENIZER_FILE)
    return report(options.folder)


def to_collect(have: Iterable[str] = ()) -> list[str]:
    """Return the sorted names of the packages to take along. ``have``: further packages that the GPU machine has."""
    there = {canonicalize_name(name) for name in (*ON_THE_MACHINE, *have)}
    return sorted(closure(needed(ROOT / "pyproject.toml"), there))


def closure(names: Iterable[str], without: Collection[str]) -> Iterator[str]:
    """Yield the packages ``names`` and all that they depend on, by the metadata of the packages installed here.

    The packages in ``without`` are left out, and so is what only they need.
    """
    todo, seen = [canonicalize_name(name) for name in names], set(without)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        needs = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        todo += [canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate(MARKERS)]


def report(folder: Path) -> int:
    """Print the files of ``folder`` and their total size. Return the exit code: 1 if they are over ``MOST_BYTES``."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    for name, size in sizes.items():
        print(f"{size / 2**20:8.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total / 2**20:8.2f} MiB  in {len(sizes)} files; at most {MOST_BYTES / 2**20:.0f} MiB may be taken along")
    return int(total > MOST_BYTES)


def _download(pins: list[str], folder: Path) -> int:
    command = python_command("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
    command += ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_x86_64"]
    return subprocess.run([*command, *pins], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
