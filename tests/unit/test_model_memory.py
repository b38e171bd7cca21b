"""How much memory there is, and how many tokens of KV pool that makes."""

from __future__ import annotations

import pytest
import torch

from pdserve.model_runner.device.choice import choose_dtype
from pdserve.model_runner.errors import NotEnoughMemory
from pdserve.model_runner.pool_size import (
    PoolRequest,
    PoolTokens,
    WindowRequest,
    choose_max_total_tokens,
    choose_pool_tokens,
    windows_ratio,
)
from pdserve.runtime.machine.memory import Memory

GIB = 2**30
MIB = 2**20


def choose(
    device: str = "cpu",
    *,
    max_total_tokens: int | None = None,
    fraction: float | None = None,
    most_tokens: int = 10**9,
    memory: Memory = Memory(16 * GIB, 12 * GIB),  # noqa: B008 - immutable
) -> int:
    request = PoolRequest(max_total_tokens, fraction, 16, most_tokens)
    return choose_max_total_tokens(request, MIB, 2 * GIB, memory, device)


def test_fraction_of_an_accelerator() -> None:
    # free 12 − 16 × (1 − 0.75) = 8 GiB: 8192 pages, one of which is page 0.
    assert choose("cuda", fraction=0.75) == 8191 * 16


def test_fraction_of_a_host_counts_only_our_own_use() -> None:
    # 16 × 0.75 − 2 = 10 GiB.
    assert choose(fraction=0.75) == 10239 * 16
    # Others left 4 GiB, a tenth of which stays free.
    assert choose(fraction=0.75, memory=Memory(16 * GIB, 4 * GIB)) == (int(4 * 1024 * 0.9) - 1) * 16


def test_never_more_than_all_requests_can_fill() -> None:
    assert choose(most_tokens=1000) == 63 * 16


def test_explicit_tokens_are_floored_to_pages() -> None:
    assert choose(max_total_tokens=100) == 96


@pytest.mark.parametrize(
    ("tokens", "fraction", "says"),
    [
        (15, None, "less than a page"),
        (16 * 20000, None, r"takes 19.53 GiB, but 12.00 GiB are free; choose at most 196592"),
        (None, 0.1, "--mem-fraction-static 0.1 of 16.00 GiB leaves no room .* raise it"),
    ],
)
def test_misfits_say_what_to_do(tokens: int | None, fraction: float | None, says: str) -> None:
    with pytest.raises(NotEnoughMemory, match=says):
        choose(max_total_tokens=tokens, fraction=fraction)
    assert choose(max_total_tokens=196592) == 196592


def test_dtype_auto_is_the_same_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for flags in ({"avx2", "avx512_bf16"}, {"avx2"}, set[str]()):
        monkeypatch.setattr("pdserve.runtime.machine.processor.cpu_flags", lambda flags=flags: flags)
        assert choose_dtype("auto", cpu) == torch.bfloat16
    assert choose_dtype("float32", cpu) == torch.float32
    assert choose_dtype("float16", cpu) == torch.float16


def choose_both(
    kept_bytes: int = MIB,
    window_bytes: int = 5 * MIB,
    *,
    max_total_tokens: int | None = None,
    ratio: float | None = None,
    most_tokens: int = 10**9,
    rows: int = 256,
    free: int = 12 * GIB,
) -> PoolTokens:
    """Of 16 GiB, 10 for pools of a model with windows of 1024 tokens."""
    request = PoolRequest(max_total_tokens, 0.75, 16, most_tokens)
    windows = WindowRequest(1024, 32768, 512, rows, ratio)
    return choose_pool_tokens(request, windows, (kept_bytes, window_bytes), 2 * GIB, Memory(16 * GIB, free), "cpu")


def pages(tokens: PoolTokens) -> tuple[int, int]:
    return tokens.kept // 16, tokens.windowed // 16


def test_both_pools_run_out_with_requests_of_four_windows() -> None:
    assert windows_ratio(1024, 32768, 16) == (1024 + 16) / 4096
    assert windows_ratio(1024, 2048, 16) == (1024 + 16) / 2048
    kept, windowed = pages(choose_both())
    assert 0 <= 10 * 1024 - (kept + 1 + 5 * (windowed + 1)) < 6
    assert abs(windowed / kept - 1040 / 4096) < 0.001
    # One pool for all layers would have held less than half as many tokens.
    assert kept > 2.6 * (10 * 1024 // 6)


def test_windows_get_what_is_said_and_no_more_than_all_requests_need() -> None:
    kept, windowed = pages(choose_both(ratio=0.5))
    assert abs(windowed / kept - 0.5) < 0.01
    # Two requests need 65 pages each, and 32 of a piece; as much again is for prefixes.
    assert pages(choose_both(rows=2)) == (10 * 1024 - 1 - 5 * (2 * (2 * 65 + 32) + 1), 324)
    assert pages(choose_both(most_tokens=1600, ratio=0.1)) == (100, 100)


def test_where_all_layers_have_windows_pages_that_are_kept_are_mere_numbers() -> None:
    kept, windowed = pages(choose_both(kept_bytes=0))
    assert 5 * (windowed + 1) <= 10 * 1024 < 5 * (windowed + 2)
    assert abs(windowed / kept - 1040 / 4096) < 0.001
    # As many of them as could ever be needed cost nothing.
    assert pages(choose_both(kept_bytes=0, ratio=1e-9, most_tokens=16 * 10**6)) == (10**6, 2047)


def test_explicit_tokens_are_those_that_are_kept() -> None:
    assert pages(choose_both(max_total_tokens=16000)) == (1000, 254)
    assert pages(choose_both(max_total_tokens=160)) == (10, 10)
    with pytest.raises(NotEnoughMemory, match=r"--max-total-tokens 160000 takes .* are free"):
        choose_both(max_total_tokens=160000)
    with pytest.raises(NotEnoughMemory, match="0 tokens of KV fit"):
        choose_both(free=100 * MIB)
    with pytest.raises(NotEnoughMemory, match=r"--max-total-tokens|KV fit behind windows"):
        choose_both(free=256 * MIB)
