"""Real control groups for the tests, where this machine lets us make some."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.processes import wait_until

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


@contextmanager
def limited_group(cores: float, memory: int) -> Iterator[list[Path]]:
    """Groups within our own ones that allow ``cores`` and ``memory`` (bytes); skips the test where there can't be any.

    A process enters by writing its id to the ``cgroup.procs`` of each.
    """
    quota = int(cores * PERIOD_US)
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in _membership())}
    if "" in own and (ROOT / "cgroup.controllers").is_file():
        limits = {
            ROOT / own[""].lstrip("/"): {"cpu.max": f"{quota} {PERIOD_US}", "memory.max": str(memory)},
        }
    else:
        cpu = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
        limits = {
            _v1_group(own, "cpu"): cpu,
            _v1_group(own, "memory"): {"memory.limit_in_bytes": str(memory)},
        }
    with ExitStack() as stack:
        yield [stack.enter_context(_group(parent, files)) for parent, files in limits.items()]


def _membership() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()


def _v1_group(own: dict[str, str], controller: str) -> Path:
    for controllers, path in own.items():
        if controller in controllers.split(",") and (ROOT / controllers).is_dir():
            return ROOT / controllers / path.lstrip("/")
    pytest.skip(f"there is no control group of {controller} here")


@contextmanager
def _group(parent: Path, files: dict[str, str]) -> Iterator[Path]:
    folder = parent / f"pdserve-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made here: {e}")
    try:
        try:
            for name, text in files.items():
                (folder / name).write_text(text)
        except OSError as e:
            pytest.skip(f"a control group can't be limited here: {e}")
        yield folder
    finally:
        # The kernel keeps a group until its last process is reaped.
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), 15, f"{folder} is empty")
        folder.rmdir()
