"""A folder that no process of ours may import from: it has a module for every name that one could ask for."""

from __future__ import annotations

import atexit
import os
import shutil
import site
import sys
import tempfile
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

CODE = """\
open(__file__ + ".imported", "w").close()
raise RuntimeError(__file__ + " was imported from the current directory")
"""


class HostileFolder:
    """``path``: a folder with a module that raises for each name of the standard library and of what is
    installed, but for those in ``without``.

    That includes what only some processes import, and what a library imports if it finds it.
    """

    def __init__(self, path: Path, without: Container[str] = ()) -> None:
        self.path = path
        for name in set(module_names()):
            if name not in without:
                (self.path / f"{name}.py").write_text(CODE)

    def imported(self) -> list[str]:
        """Return the modules that a process imported from this folder."""
        return sorted(path.name.removesuffix(".py.imported") for path in self.path.glob("*.imported"))

    def forget(self) -> None:
        """Forget what was imported."""
        for path in self.path.glob("*.imported"):
            path.unlink()

    def environment(self, env: dict[str, str] | None = None) -> dict[str, str]:
        """Return ``env``, or that of the tests, as a user has it: nothing in it keeps Python from importing
        from here.
        """
        return {name: value for name, value in (env or os.environ).items() if name != "PYTHONSAFEPATH"}


def module_names() -> Iterator[str]:
    """Return the top-level names that can be imported, by their files: nothing is imported to find them out."""
    yield from sys.stdlib_module_names
    folders = {Path(entry) for entry in (*sys.path, *site.getsitepackages()) if "site-packages" in entry}
    for folder in folders:
        for path in folder.iterdir():
            name = path.name.split(".")[0]
            if name.isidentifier() and (path.is_dir() or path.suffix in (".py", ".so")):
                yield name
    # Not installed here, but imported where they are.
    yield from ("cupy", "flash_attn", "flashinfer", "pynvml", "sgl_kernel", "sitecustomize", "usercustomize", "vllm")


@cache
def hostile_folder() -> HostileFolder:
    """Make the hostile folder of this process, which is removed at its end."""
    path = tempfile.mkdtemp(prefix="hostile-")
    atexit.register(shutil.rmtree, path)
    return HostileFolder(Path(path))
