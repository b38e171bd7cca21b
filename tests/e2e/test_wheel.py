"""A wheel with compiled kernels, installed where there is no compiler and no cache, serves with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.processes import launched
from support.wheels import build_wheel, copy_tree

from pdserve.model_runner.cpu_engine.build import (
    LEVELS,
    BuildError,
    build,
    build_all,
    choose_level,
    library_path,
    prebuilt_name,
)


def make_environment(folder: Path, wheel: Path) -> Path:
    """Make a new environment with ``wheel``, and return its Python. Dependencies come from this one's packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    # A folder that is named so is searched last, and its own .pth files, an editable pdserve among them, are not read.
    (packages / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_an_installed_wheel_needs_no_compiler(tmp_path, tiny_args):
    try:
        library = build(choose_level())
    except BuildError as e:
        pytest.skip(str(e))
    source = copy_tree(tmp_path)
    prebuilt = source / "model_runner/cpu_engine/prebuilt"
    prebuilt.mkdir()
    shutil.copy(library, prebuilt / prebuilt_name(library))
    # One of other sources, which would not load.
    (prebuilt / f"kernels-{choose_level().name}-0000000000000000.so").write_bytes(b"stale")
    wheel = build_wheel(source, tmp_path)
    assert re.search(r"-py3-none-(manylinux_2_\d+|linux)_x86_64\.whl$", wheel.name), wheel.name
    python = make_environment(tmp_path / "env", wheel)

    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = {**kept, "PATH": str(python.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with launched(tmp_path, "installed", "server", *tiny_args, python=str(python), env=env) as server:
        server.wait_healthy()
        assert server.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4})["output_ids"]
        assert server.info()["attention_backend"] == "cpu"
        loaded = {m.path for m in server.family()["worker"].memory_maps() if "/kernels-" in m.path}
    [path] = loaded
    assert Path(path).name == prebuilt_name(library)
    assert Path(path).is_relative_to(tmp_path / "env")
    assert [path.name for path in (tmp_path / "cache/pdserve").iterdir()] == ["weights"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_levels_are_built_and_nothing_else_is_kept(tmp_path):
    (tmp_path / "kernels-avx2-0000000000000000.so").touch()
    build_all(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {prebuilt_name(library_path(level)) for level in LEVELS}
