"""Attention's kernels without a GPU: their tiles, in Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.attention_compiles import DEEPSEEK_V3, LLAMA_8B, MODELS, decode, others, plans, prefill
from support.interpreter import interpret
from support.triton_compiles import most_stack

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_runner.attention.triton.tiles import (
    MOST_SPLITS,
    TileShape,
    decode_tiles,
    most_splits,
    prefill_tile_list,
    prefill_tiles,
    shared_bytes,
    split_tokens,
)
from pdserve.model_runner.device.triton_compiler import (
    SHARED_BYTES,
    Compiled,
    CompileError,
    CompileRequest,
    compile_kernel,
    compile_kernels,
)
from pdserve.model_runner.engines.attention_choice import choose_attention_backend

DEVICE_TESTS = sorted((Path(__file__).parents[2] / "device").glob("test_device_attention*.py"))
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("quarter", range(4))
def test_all_agree_with_the_reference_in_the_interpreter(quarter: int) -> None:
    interpret(DEVICE_TESTS, quarter=quarter)


def check_resources(requests: list[CompileRequest]) -> list[Compiled]:
    results = compile_kernels(requests)
    check_compiled(requests, results)
    return results


def check_compiled(requests: list[CompileRequest], results: list[Compiled]) -> None:
    for request, compiled in zip(requests, results, strict=True):
        described = f"{request.kernel} {request.constants} for {request.capability}: {compiled.registers} registers"
        assert compiled.stack_bytes <= most_stack(), f"{described}, and {compiled.stack_bytes} bytes of a thread spill"
        room = SHARED_BYTES[request.capability]
        assert compiled.shared_bytes <= room, f"{described}, {compiled.shared_bytes} bytes shared"
        assert compiled.registers * 32 * request.num_warps <= 65536, f"{described} do not fit"


def sample() -> list[CompileRequest]:
    """Return requests for kernels of decodes, of prompts and of latent attention."""
    return [decode(LLAMA_8B, 80), prefill(LLAMA_8B, 90), decode(DEEPSEEK_V3, 90)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_compile_without_spills(capability: int) -> None:
    requests = [*plans(capability)]
    for model in MODELS.values():
        requests += [decode(model, capability), prefill(model, capability), *others(model, capability)]
    results = check_resources(requests)
    for request, compiled in zip(requests, results, strict=True):
        kernel, models = request.kernel.rpartition(":")[2], list(MODELS.values())
        if kernel in ("paged_decode_split", "paged_prefill"):
            model = models[(requests.index(request) - 2) // 4]
            rows = request.constants.get("BLOCK_H") or request.constants["BLOCK_M"]
            blocks = (rows, request.constants["BLOCK_N"], request.num_warps, request.num_stages)
            expected_bytes = shared_bytes(model.shape, blocks, 1 if kernel == "paged_decode_split" else 2)
            assert compiled.shared_bytes <= expected_bytes, f"{kernel} of {model} takes more than tiles.py thinks"


def test_a_kernel_that_does_not_compile_is_reported() -> None:
    request = decode(LLAMA_8B, 90)
    request.types.pop("scale")
    with pytest.raises(CompileError, match=r"not its own, or missing: \['scale'\]"):
        compile_kernel(request)
    # What the compiling process says of an error. It imports no torch for this one.
    nowhere = CompileRequest(kernel="pdserve.nowhere:kernel", types={}, constants={})
    with pytest.raises(CompileError, match=r"No module named 'pdserve\.nowhere'"):
        compile_kernels([nowhere])


@pytest.mark.parametrize("capability", [80, 90, 100, 103, 121])
def test_tiles_fit_or_are_refused(capability: int) -> None:
    refused = {"DeepSeek-V2-Lite, float32"}
    room = max((known, size) for known, size in SHARED_BYTES.items() if known <= capability)[1]
    for name, model in MODELS.items():
        if capability == 121 and name in refused:
            with pytest.raises(ValueError, match="no tiles for rows of"):
                prefill_tiles(model.shape, capability)
            continue
        for tiles, loops in ((decode_tiles(model.shape, capability), 1), (prefill_tiles(model.shape, capability), 2)):
            blocks = (tiles[0], tiles[1], tiles.num_warps, tiles.num_stages)
            assert shared_bytes(model.shape, blocks, loops) <= room


def test_tiles_follow_the_heads() -> None:
    shape = LLAMA_8B.shape
    assert [decode_tiles(shape._replace(group=g), 90).block_h for g in (1, 4, 16, 17, 48)] == [16, 16, 16, 32, 32]
    assert decode_tiles(shape, 90).programs == 3
    assert decode_tiles(DEEPSEEK_V3.shape, 90).least_split == 1024, "its heads leave more behind than they read"
    with pytest.raises(ValueError, match="no tiles for rows of 2048 elements"):
        prefill_tiles(TileShape(2048, 2048, 1, 2, 2), 90)


def test_splits_grow_with_the_row() -> None:
    assert [split_tokens(n, 256) for n in (1, 256, 16384, 16385, 131072)] == [256, 256, 256, 512, 2048]
    for length in (*range(1, 3000, 37), 100_000, 1_000_000):
        assert -(-length // split_tokens(length, 32, 8)) <= min(8, most_splits(length, 32))
    assert most_splits(10**6, 256) == MOST_SPLITS


def test_tiles_of_chunks_cover_each_query_once() -> None:
    rng = np.random.default_rng(4)
    q_lens = rng.integers(2, 90, 20)
    kv_lens = q_lens + rng.integers(0, 200, 20)
    tiles = prefill_tile_list(q_lens, kv_lens, 16)
    covered = sorted((e, q) for e, first in tiles.tolist() for q in range(first, min(first + 16, q_lens[e])))
    assert covered == [(e, q) for e, q_len in enumerate(q_lens.tolist()) for q in range(q_len)]
    seen = (kv_lens - q_lens)[tiles[:, 0]] + tiles[:, 1]
    assert (np.diff(seen) <= 0).all(), "those with most to do come first"


def test_a_cpu_has_triton_in_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = None
    with pytest.raises(UnsupportedModel, match=r"--attention-backend triton: .* or TRITON_INTERPRET=1"):
        choose_attention_backend("triton", spec, CPU, torch.float32, torch.float32)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedModel, match=r"not installed here; pip install 'pdserve\[triton\]'"):
        choose_attention_backend("triton", spec, CPU, torch.float32, torch.float32)
