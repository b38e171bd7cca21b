"""Python, the packages that pdserve stands on, and whether torch could use a GPU. Imports none of them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .finding import Finding, ok, problem, warning

PACKAGE = "pdserve"
INSTALL = "pip install --upgrade pdserve brings what it needs; constraints.txt names versions that are tested."


def look_at_python() -> Iterator[Finding]:
    """Examine whether pdserve works with the version of this Python."""
    asked = metadata(PACKAGE)["Requires-Python"]
    text = f"{platform.python_version()} ({sys.executable})"
    if SpecifierSet(asked).contains(platform.python_version(), prereleases=True):
        yield ok("python", text)
    else:
        yield problem("python", f"{text}; pdserve needs {asked}", "Install it with another Python.")


def look_at_packages() -> Iterator[Finding]:
    """Check that every package that pdserve needs is there, in a version that it accepts."""
    wanted = [Requirement(line) for line in requires(PACKAGE) or ()]
    wanted = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    wrong = []
    for need in wanted:
        try:
            there = version(need.name)
        except PackageNotFoundError:
            wrong.append(f"{need.name} is missing")
            continue
        if not need.specifier.contains(there, prereleases=True):
            wrong.append(f"{need.name} is {there} and should be {need.specifier}")
    if wrong:
        yield problem("packages", "; ".join(wrong), INSTALL)
    else:
        yield ok("packages", f"pdserve {version(PACKAGE)} and all {len(wanted)} packages that it needs")


def look_at_torch(dev: Path = Path("/dev")) -> Iterator[Finding]:
    """Examine the installed torch: its version, and whether it could use a GPU.

    ``dev``: where the GPUs' device files are.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        yield problem("torch", "is missing", INSTALL)
        return
    gpus = len(list(dev.glob("nvidia[0-9]*")))
    if not gpus:
        yield ok("torch", f"{torch}; no NVIDIA GPU is visible, the processor computes")
    elif "+cpu" in torch:
        yield warning(
            "torch",
            f"{torch} can't use the {gpus} NVIDIA GPU{'s' * (gpus > 1)} here",
            "Install torch with CUDA to use one, or ignore this to compute on the processor.",
        )
    else:
        yield ok("torch", f"{torch}; {gpus} NVIDIA GPU{'s' * (gpus > 1)}: a unified instance can use one (--device)")
