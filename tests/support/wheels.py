"""Wheels of this tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = """
import setuptools.build_meta, sys, warnings
warnings.simplefilter('ignore')
print(setuptools.build_meta.build_wheel(sys.argv[1]))
"""


def copy_tree(folder: Path) -> Path:
    """Copy the tree without files that builds and tools left in it."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "prebuilt")
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=ignored))


def build_wheel(source: Path, wheels: Path) -> Path:
    """Build the wheel of ``source`` into ``wheels``."""
    run = subprocess.run([sys.executable, "-c", BUILD, wheels], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [wheel] = wheels.glob("*.whl")
    return wheel
