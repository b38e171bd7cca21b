"""Keys and values in pairs: the same bits come out as in token order, which test_kernels_attention.py holds to float64.

Shapes: T tokens, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.messages.worker import KVLayout
from pdserve.model_runner.attention.torch_backend import TorchAttention
from pdserve.model_runner.kernels.build import BuildError, choose_level
from pdserve.model_runner.kernels.team import Team
from pdserve.model_runner.kv_pool import MHATokenToKVPool
from tests.unit.test_kernels_attention import LAYERS, PASSES, Case, attend, make_case

try:
    LACKING = not choose_level().multiplies_pairs
except BuildError:
    LACKING = True
pytestmark = pytest.mark.skipif(LACKING, reason="this processor has no dot products of pairs")


def in_pairs(data: Tensor) -> Tensor:
    """[P, L, 2, page_size, K, D] in token order, dealt out as kv_pairs.h has it: the same shape, other places."""
    pages, layers, _, size, heads, dim = data.shape
    keys, values = (data[:, :, part].unflatten(2, (size // 16, 16)) for part in (0, 1))
    # [P, L, block, slot, K, D]: keys to [K, D / 2, slot, 2], values to [K, pair of slots, D, 2].
    keys = keys.unflatten(-1, (dim // 2, 2)).permute(0, 1, 2, 4, 5, 3, 6)
    values = values.unflatten(3, (8, 2)).permute(0, 1, 2, 5, 3, 6, 4)
    return torch.stack([part.reshape(pages, layers, size, heads, dim) for part in (keys, values)], 2).contiguous()


def pairs_pool(pool: MHATokenToKVPool) -> MHATokenToKVPool:
    layout = msgspec.structs.replace(pool.layout, order="pairs")
    twin = MHATokenToKVPool(layout, len(pool.data), torch.device("cpu"))
    twin.data.copy_(in_pairs(pool.data))
    return twin


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("shape", [(6, 2, 16), (9, 3, 64), (8, 1, 128), (4, 4, 80)])
@pytest.mark.parametrize("name", PASSES)
def test_attention_gives_the_same_bits(name: str, shape: tuple[int, int, int], page_size: int, threads: int) -> None:
    torch.manual_seed(3)
    case = make_case(shape, torch.bfloat16, page_size, *PASSES[name])
    expected = attend(case, threads=threads)
    assert torch.isfinite(expected).all()
    assert torch.equal(attend(case._replace(pool=pairs_pool(case.pool)), threads=threads, passes=2), expected)


@given(
    st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.tuples(st.integers(1, 9), st.integers(1, 4), st.sampled_from([16, 32, 48, 64, 112, 128, 192])),
    st.sampled_from([16, 32, 64]),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([1, 1, 1, 2, 7, 64, 90])), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_attention_gives_the_same_bits_for_random_sizes(
    seed: int,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    page_size: int,
    spans: list[tuple[int, int]],
) -> None:
    torch.manual_seed(seed)
    group, kv_heads, dim = sizes
    starts, q_lens = (list(column) for column in zip(*spans, strict=True))
    case = make_case((group * kv_heads, kv_heads, dim), torch.bfloat16, page_size, starts, q_lens)
    case = Case(case.pool, case.batch, case.q_THD.to(dtype))
    expected = attend(case)
    assert torch.isfinite(expected).all()
    assert torch.equal(attend(case._replace(pool=pairs_pool(case.pool)), threads=2), expected)


@given(
    st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.tuples(st.integers(1, 5), st.sampled_from([16, 48, 64]), st.sampled_from([16, 48]), st.integers(1, 4)),
    st.integers(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_store_writes_its_slots_and_leaves_their_neighbours(
    seed: int, dtype: torch.dtype, sizes: tuple[int, int, int, int], layer: int
) -> None:
    from pdserve.model_runner.kernels.attention import PagedAttention

    torch.manual_seed(seed)
    kv_heads, dim, page_size, pages = sizes
    pool = MHATokenToKVPool(KVLayout(page_size, LAYERS, kv_heads, dim, "bfloat16", 0), pages + 1, torch.device("cpu"))
    pool.data.normal_()
    twin = pairs_pool(pool)
    slots = torch.randperm(pages * page_size)[: 1 + seed % (pages * page_size)] + page_size
    k, v = (torch.randn(len(slots), kv_heads, dim).to(dtype) for _ in range(2))
    for each in (pool, twin):
        PagedAttention(each, kv_heads, Team(1)).store(layer, slots, k, v)
    assert torch.equal(bits(twin.data), bits(in_pairs(pool.data)))


def test_who_cannot_read_pairs_refuses_them() -> None:
    from pdserve.model_runner.kernels.attention import PagedAttention

    for layout in (KVLayout(16, 1, 1, 16, "float32", 0, "pairs"), KVLayout(8, 1, 1, 16, "bfloat16", 0, "pairs")):
        with pytest.raises(ValueError, match="can't lie in pairs"):
            PagedAttention(MHATokenToKVPool(layout, 2, torch.device("cpu")), 1, Team(1))
    pool = MHATokenToKVPool(KVLayout(16, 1, 1, 16, "bfloat16", 0, "pairs"), 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="token order"):
        TorchAttention(pool, 1, torch.bfloat16)
