"""How much memory there is, and how many tokens of KV pool that makes."""

from __future__ import annotations

import pytest

from pdserve.model_runner.device.choice import choose_dtype
from pdserve.model_runner.errors import NotEnoughMemory
from pdserve.model_runner.kv.size import (
    CONTEXT_BYTES,
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
    weights: int = 2 * GIB,
    instances: int = 1,
) -> int:
    request = PoolRequest(max_total_tokens, fraction, 16, most_tokens, instances=instances)
    return choose_max_total_tokens(request, MIB, weights, memory, device)


def test_fraction_of_an_accelerator() -> None:
    # 16 × 0.75 − 2 GiB, less 600 MiB of the context: 9640 pages, one of which is page 0.
    assert choose("cuda", fraction=0.75) == 9639 * 16
    # Others left 4 GiB, of which 1 stays free.
    assert choose("cuda", fraction=0.9375, memory=Memory(16 * GIB, 4 * GIB)) == (3 * 1024 - 1) * 16


class SimulatedGpu:
    """A GPU of 80 GiB and what instances take of it: weights and context, then a pool, then activations and graphs."""

    def __init__(self, weights: tuple[int, ...], fraction: float) -> None:
        self.free = 80 * GIB
        self.pools = dict.fromkeys(range(len(weights)), 0)
        self._weights, self._fraction = weights, fraction

    def do(self, what: str, instance: int) -> None:
        weights = self._weights[instance]
        if what == "load":
            self.free -= weights + CONTEXT_BYTES
        elif what == "run":
            self.free -= 2 * GIB
        else:
            request = PoolRequest(None, self._fraction, 16, 10**9)
            tokens = choose_max_total_tokens(request, MIB, weights, Memory(80 * GIB, self.free), "cuda")
            self.pools[instance] = (tokens // 16 + 1) * MIB
            self.free -= self.pools[instance]
        assert self.free >= 0


ORDERS = [
    [(0, "load pool run"), (1, "load pool run")],
    [(1, "load pool run"), (0, "load pool run")],
    [(0, "load"), (1, "load"), (0, "pool"), (1, "pool"), (0, "run"), (1, "run")],
    [(0, "load"), (1, "load"), (1, "pool"), (1, "run"), (0, "pool"), (0, "run")],
    [(0, "load pool"), (1, "load"), (0, "run"), (1, "pool run")],
]


@pytest.mark.parametrize("weights", [(16 * GIB, 16 * GIB), (16 * GIB, 2 * GIB)])
def test_instances_on_one_gpu_have_their_shares_whichever_starts_first(weights: tuple[int, int]) -> None:
    """As ``pdserve up`` divides a GPU, which starts them at the same time."""
    found = []
    for order in ORDERS:
        gpu = SimulatedGpu(weights, 0.44)
        for instance, steps in order:
            for what in steps.split():
                gpu.do(what, instance)
        found.append(gpu.pools)
    assert all(pools == found[0] for pools in found)
    for instance, pool in found[0].items():
        assert 0 <= 0.44 * 80 * GIB - weights[instance] - CONTEXT_BYTES - pool < MIB


def of_gpu(step_bytes: int, *, fraction: float = 0.88, free: int = 60 * GIB) -> int:
    """Return the bytes of the pool of an instance with 16 GiB of weights on a GPU of 80 GiB."""
    request = PoolRequest(None, fraction, 16, 10**9, step_bytes)
    return (choose_max_total_tokens(request, MIB, 16 * GIB, Memory(80 * GIB, free), "cuda") // 16 + 1) * MIB


def test_what_steps_take_comes_from_what_the_share_leaves_and_then_from_the_pool() -> None:
    rest = int(0.12 * 80 * GIB)
    assert of_gpu(0) == of_gpu(rest - MIB)
    # Partial sums of attention in a latent space, say.
    assert 4 * GIB - MIB <= of_gpu(0) - of_gpu(rest + 4 * GIB) <= 4 * GIB + MIB
    # Nothing is left out of the share: all of it is for steps to take.
    assert of_gpu(3 * GIB, fraction=1.0) <= 80 * GIB - 16 * GIB - CONTEXT_BYTES - 3 * GIB
    # Others left little: it must do for both.
    assert of_gpu(12 * GIB, free=30 * GIB) <= 18 * GIB


def test_a_pool_beside_which_no_step_fits_says_what_steps_take() -> None:
    with pytest.raises(NotEnoughMemory, match=r"16.00 GiB of weights and 70.00 GiB that steps take \(60.00 GiB"):
        of_gpu(70 * GIB)


def test_an_instance_that_is_alone_leaves_what_it_always_left() -> None:
    gpu = SimulatedGpu((16 * GIB,), 0.88)
    gpu.do("load", 0)
    gpu.do("pool", 0)
    assert 0.12 * 80 * GIB <= gpu.free < 0.12 * 80 * GIB + 2 * MIB


def test_fraction_of_a_host_counts_only_our_own_use() -> None:
    # 16 × 0.75 − 2 = 10 GiB.
    assert choose(fraction=0.75) == 10239 * 16
    # Others left 4 GiB, a tenth of which stays free.
    assert choose(fraction=0.75, memory=Memory(16 * GIB, 4 * GIB)) == (int(4 * 1024 * 0.9) - 1) * 16


@pytest.mark.parametrize("weights", [GIB, 8 * GIB, 16 * GIB])
def test_by_default_a_host_has_room_for_any_model_beside_which_memory_is_free(weights: int) -> None:
    memory = Memory(24 * GIB, 15 * GIB)
    assert choose(memory=memory, weights=weights) == (int(24 * 1024 * 0.3) - 1) * 16
    # Little is free: a tenth of it stays.
    assert choose(memory=Memory(24 * GIB, 2 * GIB), weights=weights) == (int(2 * 1024 * 0.9) - 1) * 16
    with pytest.raises(NotEnoughMemory, match=r"0.00 GiB of memory are free .* 1 instance.* no room for a KV pool"):
        choose(memory=Memory(24 * GIB, MIB), weights=weights)


def test_instances_of_a_host_divide_the_default() -> None:
    weights, free = 8 * GIB, 23 * GIB
    taken = 0
    for _ in range(2):
        free -= weights
        tokens = choose(memory=Memory(24 * GIB, free), weights=weights, instances=2)
        assert tokens <= (int(24 * 1024 * 0.15) - 1) * 16
        taken += (tokens // 16 + 1) * MIB
    # A pool's memory is taken when it is used: all of it has to be there then.
    assert 6 * GIB < taken < free


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
    for flags in ({"avx2", "avx512_bf16"}, {"avx2"}, set[str]()):
        monkeypatch.setattr("pdserve.runtime.machine.processor.cpu_flags", lambda flags=flags: flags)
        assert choose_dtype("auto", "cpu") == "bfloat16"
    assert choose_dtype("float32", "cpu") == "float32"
    assert choose_dtype("float16", "cpu") == "float16"


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
    """Divide the memory for pools of a model with windows of 1024 tokens: 10 of 16 GiB."""
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
    with pytest.raises(NotEnoughMemory, match="0 tokens of KV fit"):
        choose_both(free=100 * MIB)
    with pytest.raises(NotEnoughMemory, match=r"--max-total-tokens|KV fit behind windows"):
        choose_both(free=256 * MIB)


@pytest.mark.parametrize("kept_bytes", [MIB, 0])
def test_tokens_that_do_not_fit_with_their_windows_say_how_many_do(kept_bytes: int) -> None:
    with pytest.raises(NotEnoughMemory, match=r"--max-total-tokens 160000 takes .* are free") as refused:
        choose_both(kept_bytes, max_total_tokens=160000)
    most = int(str(refused.value).rpartition(" ")[2])
    assert choose_both(kept_bytes, max_total_tokens=most).kept == most
    with pytest.raises(NotEnoughMemory, match=f"choose at most {most}"):
        choose_both(kept_bytes, max_total_tokens=most + 16)
