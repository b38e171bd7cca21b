"""The levels of the CPU kernels: which one is chosen, and that the lower ones pass the tests that the best one passes.

A process loads one library, so those tests run once more in a process of their own for each lower level. Their
tolerances stay: all levels add in float32, in other orders, and the lower ones round no more often.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.machine import limit

from pdserve.model_runner.cpu_engine import build
from pdserve.model_runner.cpu_engine.build import ISA_VARIABLE, LEVELS, BuildError, IsaLevel, choose_level, levels_here

BF16, VNNI, AVX512, AVX2 = LEVELS
HERE = Path(__file__).parent
TESTS = ("linear", "grid", "attention", "sampling", "engine", "layers")
# Runs the tests and then says which of our libraries this process has loaded.
CHILD = """
import sys, pytest
status = pytest.main(sys.argv[1:])
with open("/proc/self/maps") as maps:
    print("loaded:", *sorted({line.split("/")[-1].strip() for line in maps if "/kernels-" in line}))
sys.exit(status)
"""


# Products of all kinds of blocks, as digests.
DIGESTS = """
import hashlib, json
import numpy as np, torch
from pdserve.model_runner.cpu_engine.library import ActivationDType
from pdserve.model_runner.cpu_engine.single_kernels import PackedWeight
from pdserve.model_runner.loader.quantized_blocks import FORMATS
from pdserve.model_runner.loader.random_blocks import random_blocks
found = {}
for kind, block_format in FORMATS.items():
    blocks = random_blocks(kind, 80, 1024, np.random.default_rng(7))
    packed = PackedWeight(blocks, 80, 1024, torch.float32, block_format)
    a = torch.from_numpy(np.random.default_rng(8).normal(size=(29, 1024)).astype(np.float32))
    for activations in ActivationDType:
        product = packed.multiply(a, activations).contiguous()
        found[f"{kind.name}, {activations.name}"] = hashlib.sha256(product.numpy().tobytes()).hexdigest()
print(json.dumps(found))
"""


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor with all that the kernels know, and no word about which to use."""
    monkeypatch.setattr(build, "cpu_flags", lambda: BF16.cpu_flags)
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    return monkeypatch


def test_each_level_has_what_the_next_one_has() -> None:
    assert [level.name for level in LEVELS] == ["avx512bf16", "avx512vnni", "avx512", "avx2"]
    for better, lesser in itertools.pairwise(LEVELS):
        assert better.cpu_flags > lesser.cpu_flags
        assert set(better.flags) > set(lesser.flags)


@pytest.mark.parametrize("level", LEVELS)
def test_the_best_level_is_chosen_and_the_variable_chooses_another(
    processor: pytest.MonkeyPatch, level: IsaLevel
) -> None:
    assert choose_level() == BF16
    processor.setenv(ISA_VARIABLE, level.name)
    assert choose_level() == level
    processor.delenv(ISA_VARIABLE)
    processor.setattr(build, "cpu_flags", lambda: level.cpu_flags | {"sse2"})
    assert choose_level() == level


def test_what_the_processor_lacks_can_not_be_chosen(processor: pytest.MonkeyPatch) -> None:
    processor.setattr(build, "cpu_flags", lambda: AVX512.cpu_flags)
    for name in ("avx512bf16", "avx512vnni", "sse"):
        processor.setenv(ISA_VARIABLE, name)
        with pytest.raises(BuildError, match=rf"{name}.* for avx512, avx2$"):
            choose_level()
    processor.setattr(build, "cpu_flags", lambda: set())
    with pytest.raises(BuildError, match="AVX2 or AVX-512"):
        choose_level()


def test_a_refusal_of_the_compiler_is_repeated_until_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources, calls, compiler = tmp_path / "sources", tmp_path / "calls", tmp_path / "g++"
    sources.mkdir()
    (sources / "a.cpp").write_text("")
    compiler.write_text(f"#!/bin/sh\necho called >>{calls}\necho bad flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for retry, count in ((False, 1), (False, 1), (True, 2)):
        with pytest.raises(BuildError, match="bad flag"):
            build.build(AVX2, sources, retry=retry)
        assert calls.read_text().count("called") == count


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first time, it compiles
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_the_kernels_pass_their_tests_at_each_lower_level(
    level: IsaLevel, record_property: Callable[[str, object], None]
) -> None:
    here = levels_here()
    if level not in here:
        pytest.skip(f"this processor lacks {level.name}")
    if level == choose_level():
        pytest.skip("the tests beside this one run this level already")
    try:
        path = build.build(level)
    except BuildError as e:
        pytest.skip(str(e))
    files = [str(HERE / f"test_kernels_{name}.py") for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "-q", "-x", "-p", "no:cacheprovider", *files],
        env={**os.environ, ISA_VARIABLE: level.name},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=limit(500),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"loaded: {path.name}"
    record_property("kernels_level", level.name)


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first time, it compiles
def test_products_with_blocks_are_the_same_bits_at_every_level() -> None:
    found = {}
    for level in levels_here():
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={**os.environ, ISA_VARIABLE: level.name},
            cwd=HERE.parents[2],
            capture_output=True,
            text=True,
            timeout=limit(500),
            check=True,
        )
        found[level.name] = json.loads(done.stdout)
    first = next(iter(found.values()))
    assert len(first) == 9 * 2
    assert all(digests == first for digests in found.values()), found
