"""Installs what the check needs from a folder of wheels: the machine may reach nothing.

Of the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from pdserve.runtime.python import python_command

TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
"""What ``tests/device`` needs."""


def needed(pyproject: Path) -> list[str]:
    """Return the names of the packages in pyproject.toml that pdserve and ``tests/device`` need, without versions."""
    with pyproject.open("rb") as file:
        project = tomllib.load(file)["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["triton"], *TEST_TOOLS]
    return [re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in lines]


def install(wheels: Path, site: Path) -> int:
    """Install the wheels of packages that are missing into the folder ``site``. Return the number of these wheels.

    The machine's own packages stay as they are. Raises ``RuntimeError`` with pip's words if it fails.
    """
    missing = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if not is_there(wheel.name.partition("-")[0], site)]
    if missing:
        command = python_command("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir")
        command += ["--disable-pip-version-check", "--target", str(site), *missing]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pip could not install from {wheels}: {done.stderr.strip()[-500:]}")
    return len(missing)


def describe(pyproject: Path, site: Path) -> None:
    """Write pdserve's own name and version into the folder ``site``, unless pdserve is installed.

    The check runs it from its source folder, and a server reads its version from the metadata of what is installed.
    """
    with pyproject.open("rb") as file:
        project = tomllib.load(file)["project"]
    name, version = project["name"], project["version"]
    if not is_there(name, site):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def is_there(name: str, site: Path) -> bool:
    """Return whether the package ``name`` is installed, in this Python or in the folder ``site``."""
    return any(importlib.metadata.distributions(name=name, path=[*sys.path, str(site)]))
