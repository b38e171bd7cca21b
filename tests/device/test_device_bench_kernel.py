"""``pdserve bench kernel``: each kernel is right with its own tiles and with others."""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE, INTERPRETED

from pdserve.benchmark.kernel.case import Ask, Mode, Place
from pdserve.benchmark.kernel.cases import CASES
from pdserve.benchmark.kernel.options import KernelBenchOptions

HEADS = "heads=4 kv_heads=2 head_dim=64"
EXPERTS = "tokens=5 experts=4 chosen=2 inner=48 hidden=64"
ASKED = [
    ("decode", "plain", f"rows=2 context=70 {HEADS}", ""),
    ("decode", "int8", f"rows=2 context=70 window=20 {HEADS}", "block_n=16 least_split=32"),
    ("prefill", "plain", f"tokens=20 cached=30 {HEADS}", ""),
    ("prefill", "fp8_e4m3", f"tokens=20 cached=30 window=20 {HEADS}", "block_m=32 block_n=16"),
    ("int4", "symmetric", "tokens=3 inputs=160 outputs=72 group=32", ""),
    ("int4", "zeros", "tokens=20 inputs=256 outputs=72 group=64", "M=32 N=16 num_stages=2"),
    ("fp8", "blocks", "tokens=3 inputs=160 outputs=130", ""),
    ("fp8", "rows", "tokens=3 inputs=160 outputs=130", "N=64 K=64"),
    ("fp8", "blocks-w8a8", "tokens=3 inputs=160 outputs=130", "N=64"),
    ("fp8", "rows-w8a8", "tokens=3 inputs=160 outputs=130", ""),
    ("experts_up", "plain", EXPERTS, "M=16 N=32"),
    ("experts_down", "plain", EXPERTS, ""),
    ("norm", "plain", "tokens=3 width=96", ""),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("kernel", "variant", "shape", "tile"), ASKED)
def test_a_case_gives_what_torch_gives(kernel, variant: str, shape: str, tile: str, dtype: str) -> None:
    options = KernelBenchOptions(
        kernel=kernel, variant=variant, shape=shape.split(), tile=tile.split(), dtype=dtype, capability=90
    )
    options.check()
    if not INTERPRETED and variant.endswith("w8a8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply FP8")
    place = Place(Mode.INTERPRETED if INTERPRETED else Mode.GPU, DEVICE, 90)
    torch.manual_seed(1)
    ask = Ask(options.sizes, variant, options.tile_sizes, getattr(torch, dtype))
    case = CASES[options.kernel](ask, place)
    assert options.tile_sizes.items() <= case.tile.items()
    assert case.error() <= case.tolerance
    assert case.nbytes > 0 < case.operations
