"""What the machine can do at best, by the level that runs. How fast it is, a test can't know."""

from __future__ import annotations

import os

import pytest

from pdserve.model_runner.kernels import roofline
from pdserve.model_runner.kernels.build import BuildError, choose_level
from pdserve.model_runner.kernels.roofline import ProductKind, Roofline


@pytest.mark.timeout(300)  # the first time, it compiles
def test_each_kind_of_product_is_measured_as_the_level_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MEMORY", 4 << 20)
    monkeypatch.setattr(roofline, "ROUNDS", 20_000)
    try:
        measured = Roofline(sorted(os.sched_getaffinity(0))[:1])
    except BuildError as error:
        pytest.skip(str(error))
    level = choose_level()
    assert measured.bandwidth() > 0
    assert measured.describe(ProductKind.FLOAT32) == "float32 FMA"
    assert measured.describe(ProductKind.BFLOAT16) == (
        "bfloat16 pairs" if level.name == "avx512bf16" else "float32 FMA"
    )
    assert ("VNNI" in measured.describe(ProductKind.BYTES)) == ("avx512_vnni" in level.cpu_flags)
    peaks = {kind: measured.peak(kind) for kind in ProductKind}
    # Each instruction does something: more than a scalar multiplication a cycle, and no more than a core ever did.
    assert all(1e9 < peak < 5e12 for peak in peaks.values()), peaks
    if "VNNI" in measured.describe(ProductKind.BYTES):
        # Four times the products of an instruction, as many instructions: what else the loop does must cost nothing.
        # In turns, so that both meet the core at its best: a neighbour may take half of it at any time.
        turns = [{kind: measured.peak(kind) for kind in ProductKind} for _ in range(20)]
        best = {kind: max(turn[kind] for turn in turns) for kind in ProductKind}
        assert best[ProductKind.BYTES] > 2.5 * best[ProductKind.FLOAT32], best
