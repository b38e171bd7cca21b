"""What the machine can do at best, by the level that runs. A test can't judge how fast that is."""

from __future__ import annotations

import os

import pytest

from pdserve.model_runner.cpu_engine.build import BuildError, choose_level
from tools.kernels import roofline
from tools.kernels.roofline import ProductKind, Roofline


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
    # How fast it is depends on what else the machine does: only what is counted can be judged.
    counted = {kind: operations(measured, kind) for kind in ProductKind}
    assert all(measured.peak(kind) > 0 for kind in ProductKind)
    assert all(count >= 2 * roofline.ROUNDS for count in counted.values()), counted
    if "VNNI" in measured.describe(ProductKind.BYTES):
        assert counted[ProductKind.BYTES] == 4 * counted[ProductKind.FLOAT32], counted


def operations(measured: Roofline, kind: ProductKind) -> int:
    """Return the operations of one thread, as the probe counts them."""
    cpus = measured._cpus
    return measured._library.pds_roofline_multiply(kind, roofline.ROUNDS, 1, cpus.ctypes.data)
