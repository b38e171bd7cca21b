"""The CPU kernels as processors without AVX-512 run them, where the tests beside this one test the AVX-512 code.

A process loads one library, so those tests run once more in a process of their own. Their tolerances stay: both codes
add in float32, in other orders, and the AVX2 code rounds no more often.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.model_runner.kernels import build
from pdserve.model_runner.kernels.build import ISA_VARIABLE, LEVELS, BuildError, best_level, choose_level, library_path

AVX512, AVX2 = LEVELS
HERE = Path(__file__).parent
TESTS = ("linear", "attention", "sampling", "engine")
# Runs the tests and then says which of our libraries this process has loaded.
CHILD = """
import sys, pytest
status = pytest.main(sys.argv[1:])
with open("/proc/self/maps") as maps:
    print("loaded:", *sorted({line.split("/")[-1].strip() for line in maps if "/kernels-" in line}))
sys.exit(status)
"""


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor with all that the kernels know, and no word about which to use."""
    monkeypatch.setattr(build, "cpu_flags", lambda: AVX512.cpu_flags | AVX2.cpu_flags)
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("name", "level"), [("", AVX512), ("avx512", AVX512), ("avx2", AVX2)])
def test_the_variable_chooses(processor: pytest.MonkeyPatch, name: str, level: build.Level) -> None:
    assert choose_level() == AVX512
    processor.setenv(ISA_VARIABLE, name)
    assert choose_level() == level


def test_what_the_processor_lacks_can_not_be_chosen(processor: pytest.MonkeyPatch) -> None:
    processor.setattr(build, "cpu_flags", lambda: AVX2.cpu_flags)
    assert choose_level() == AVX2
    for name in ("avx512", "sse"):
        processor.setenv(ISA_VARIABLE, name)
        with pytest.raises(BuildError, match=rf"{name}.* for avx2$"):
            choose_level()
    processor.setattr(build, "cpu_flags", lambda: set())
    with pytest.raises(BuildError, match="AVX2 or AVX-512"):
        choose_level()


@pytest.mark.skipif(best_level() != AVX512, reason="the tests beside this one run the AVX2 code already, or none")
@pytest.mark.slow
@pytest.mark.timeout(400)  # the first time, it compiles
def test_the_kernels_pass_their_tests() -> None:
    try:
        build.build(AVX2)
    except BuildError as e:
        pytest.skip(str(e))
    files = [str(HERE / f"test_kernels_{name}.py") for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "-q", "-x", "-p", "no:cacheprovider", *files],
        env={**os.environ, ISA_VARIABLE: AVX2.name},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"loaded: {library_path(AVX2).name}"
