"""Pages in the tiers: the same bytes, or eight bits an element within what a scale allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.messages.tiers import PageCopy
from pdserve.messages.worker import KVGroup, KVLayout
from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_runner.tiers.host_pool import HostPool
from pdserve.model_runner.tiers.page_codec import Int8, make_codecs


def layout(dtype: str = "bfloat16", elements: int = 2 * 3 * 16 * 64, **changes) -> KVLayout:
    size = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}[dtype]
    group = {"kind": "mha", "kv_heads": 3, "head_dim": 64, "dtype": dtype, "page_bytes": elements * size} | changes
    return KVLayout(16, (KVGroup(layers=(0,), **group),))


def moved(name, shape: KVLayout, values: torch.Tensor) -> torch.Tensor:
    """Return what is left of a page that went to the host and came back into another page."""
    pool = np.zeros((3, shape.page_bytes), dtype=np.uint8)
    pool[1] = values.view(torch.uint8).numpy()
    host = HostPool(2, make_codecs(name, shape), None)
    host.copy([pool], np.array([[PageCopy.TO_HOST, 1, 1], [PageCopy.TO_POOL, 2, 1]], dtype=np.int32))
    return torch.from_numpy(pool[2].copy()).view(values.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_page_comes_back_as_it_is_or_within_half_a_step(dtype):
    shape = layout(str(dtype).removeprefix("torch."))
    torch.manual_seed(1)
    values = torch.randn(2 * 3 * 16 * 64) * torch.logspace(-20, 5, 2 * 3 * 16 * 64)
    values[:64] = 0
    values = values.to(dtype)
    assert torch.equal(moved("auto", shape, values), values)
    back = moved("int8", shape, values).float().view(-1, 64)
    exact = values.float().view(-1, 64)
    steps = exact.abs().amax(dim=1, keepdim=True) / 127
    own = 2**-8 if dtype == torch.bfloat16 else 2**-20  # the target's own rounding
    assert ((back - exact).abs() <= 0.5001 * steps + own * exact.abs()).all()
    assert (back[0] == 0).all()
    assert (back != exact).any()


def test_int8_takes_little_more_than_half():
    [codec] = make_codecs("int8", layout())
    assert codec.nbytes == 2 * 3 * 16 * 64 * (1 + 4 / 64)


def test_what_comes_back_from_int8_does_not_change_again():
    shape = layout("float32")
    once = moved("int8", shape, torch.randn(2 * 3 * 16 * 64))
    torch.testing.assert_close(moved("int8", shape, once), once, rtol=1e-6, atol=0)


def test_smaller_blocks_where_a_page_has_no_whole_ones():
    assert Int8(24, torch.float32).nbytes == 24 + 3 * 4
    with pytest.raises(UnsupportedModel, match="--page-size"):
        Int8(20, torch.float32)


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"scale_dtype": "bfloat16"}])
def test_what_is_small_already_is_refused_by_name(changes):
    with pytest.raises(UnsupportedModel, match="--hicache-host-dtype"):
        make_codecs("int8", layout(**changes))
