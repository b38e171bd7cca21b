"""How threads divide the linear layers: the grids that are chosen, and what a pass of the engine reads by them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.passes import forward

from pdserve.model_runner.cpu_engine.build import BuildError, choose_level
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.native_model import NativeModel
from pdserve.model_runner.cpu_engine.structs import Product
from pdserve.model_runner.cpu_engine.weight_packer import LinearKind

from .test_kernels_engine import make_batch, make_runner, request_table, save_model

try:
    LIBRARY = load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

TILE_ROWS, PANEL = 96, 32
THREADS = (1, 2, 3, 5, 8, 16, 31, 64)
# SmolLM2-135M's layer in bfloat16: panels and k of QKV, O, gate and up, down.
LAYER = ((30, 576), (18, 576), (96, 576), (18, 1536))
# Of save_model's "heads-64", the same.
LAYERS = 3
MODEL = {
    LinearKind.QKV: (20, 96),
    LinearKind.O: (3, 384),
    LinearKind.GATE_UP: (10, 96),
    LinearKind.DOWN: (3, 160),
    LinearKind.HEAD: (4, 96),
}
TOKENS = (1, 5, 9, 48, 64, 130)


def product(rows: int, panels: int, k: int, effort: float = 1.0) -> Product:
    return Product(rows, panels, k, k * PANEL * 2, effort)


def choose(one: Product, threads: int) -> tuple[int, int, int]:
    """Groups of rows, groups of columns, bytes of weights that all threads read."""
    grid = (ctypes.c_int64 * 2)()
    traffic = LIBRARY.pds_choose_grid(one, threads, grid)
    return grid[0], grid[1], traffic


def by_rows(tokens: int, threads: int) -> bool:
    layer = (Product * len(LAYER))(*(product(tokens, *shape) for shape in LAYER))
    return bool(LIBRARY.pds_choose_by_rows(layer, threads))


def traffic_of(one: Product, row_groups: int) -> int:
    """Return the bytes that are read: each group of rows reads all the weights, once for each ``TILE_ROWS``."""
    bounds = [one.rows * i // row_groups for i in range(row_groups + 1)]
    times = sum(-(-(end - begin) // TILE_ROWS) for begin, end in itertools.pairwise(bounds))
    return int(times * one.panels * one.panel_bytes)


@given(
    st.integers(1, 5000), st.integers(1, 2000), st.integers(1, 500), st.integers(1, 64), st.sampled_from([0.5, 1, 2])
)
def test_a_grid_has_work_for_each_of_its_threads(
    rows: int, panels: int, half_k: int, threads: int, effort: float
) -> None:
    one = product(rows, panels, 2 * half_k, effort)
    row_groups, columns, traffic = choose(one, threads)
    assert 1 <= row_groups <= rows
    assert 1 <= columns <= panels
    assert row_groups * columns <= threads
    assert traffic == traffic_of(one, row_groups)


@pytest.mark.parametrize("threads", THREADS)
def test_a_decode_of_few_tokens_reads_the_weights_once(threads: int) -> None:
    for panels, k in LAYER:
        one = product(4, panels, k)
        assert choose(one, threads)[2] == panels * one.panel_bytes
    assert threads == 1 or not by_rows(4, threads)


def test_64_tokens_on_16_threads_do_not_read_the_weights_16_times() -> None:
    once = sum(panels * product(64, panels, k).panel_bytes for panels, k in LAYER)
    assert sum(choose(product(64, *shape), 16)[2] for shape in LAYER) <= 2.5 * once
    assert not by_rows(64, 16)


@pytest.mark.parametrize(("tokens", "threads"), [(256, 2), (512, 2), (1, 1), (512, 1)])
def test_long_prompts_on_few_threads_go_by_rows(tokens: int, threads: int) -> None:
    assert by_rows(tokens, threads)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("bfloat16", THREADS[::2]),
        ("float32", (1, *THREADS[1::4])),
        *(pytest.param(dtype, THREADS, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32")),
    ],
)
def test_each_number_of_threads_gives_the_same_bits_and_the_expected_traffic(
    tmp_path: Path, dtype: str, numbers: tuple[int, ...]
) -> None:
    folder, table = save_model(tmp_path, "heads-64"), request_table()
    expected: dict[int, torch.Tensor] = {}
    for threads in numbers:
        torch.set_num_threads(threads)
        runner = make_runner(folder, "cpu", dtype=dtype)
        native = runner.engine.native
        assert isinstance(native, NativeModel)
        for tokens in TOKENS:
            logits = forward(runner.engine, make_batch(table, [(0, 0, tokens)])).clone()
            assert torch.equal(logits, expected.setdefault(tokens, logits)), (threads, tokens)
            read = expected_bytes(tokens, threads, getattr(torch, runner.dtype))
            assert native.weight_bytes_read() == read, (threads, tokens)


def expected_bytes(tokens: int, threads: int, dtype: torch.dtype) -> dict[LinearKind, int]:
    """Return the bytes of weights that a pass over ``save_model``'s layers, and the head for all tokens,
    should read.
    """
    level = choose_level()
    effort = 0.5 if level.name == "avx512bf16" and dtype == torch.bfloat16 else 2.0 if level.name == "avx2" else 1.0
    products = {
        kind: Product(tokens, panels, k, k * PANEL * dtype.itemsize, effort) for kind, (panels, k) in MODEL.items()
    }
    layer = (Product * len(LAYER))(*(products[kind] for kind in products if kind != LinearKind.HEAD))
    rows = LIBRARY.pds_choose_by_rows(layer, threads)
    result = dict.fromkeys(LinearKind, 0)
    for kind, one in products.items():
        alone = kind == LinearKind.HEAD
        row_groups = threads if rows and not alone else choose(one, threads)[0]
        result[kind] = traffic_of(one, row_groups) * (1 if alone else LAYERS)
    return result
