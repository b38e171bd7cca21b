"""What a layer has beside attention, and pages of KV on their way, against the host: for ``kernels_part.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from pdserve.mem_cache.kv_pages.page_group import LayerRange
from pdserve.mem_cache.kv_pages.region import HostMemory
from pdserve.mem_cache.kv_pages.staging import Piece
from pdserve.model_files.spec import Activation, ExpertsSpec, NormSpec, RopeSpec
from pdserve.model_runner.device.choice import open_device
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import make_pool
from pdserve.model_runner.kv.staging import PoolPages
from pdserve.model_runner.ops.base import DeviceOps
from pdserve.model_runner.ops.layers.expert_networks import ExpertNetworks, StackedLinear
from pdserve.model_runner.ops.layers.rms_norm import RMSNorm
from pdserve.model_runner.ops.layers.rotary import RotaryEmbedding
from pdserve.model_runner.ops.torch_ops import TorchOps

from .part import Part
from .record import Check, Finding

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest difference to torch's operations on the CPU, which round more often. It is a share of the number, or of 1 if
the number is less.
"""
ROUNDS = 8


def checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each check of a layer's operations and of page copies."""
    for dtype in TOLERANCE:
        for name, run in OPS.items():
            title = f"triton, {str(dtype).removeprefix('torch.')}: {name}"
            yield title, lambda d=dtype, r=run: check_op(part, d, r)  # type: ignore[misc]
    yield "triton: pages gathered and scattered", lambda: check_pages(part)
    yield "triton: checksum of pages", lambda: check_checksum(part)
    yield "KV pages through pinned memory, as hand-overs move them", lambda: check_transfer(part)


def check_op(
    part: Part, dtype: torch.dtype, run: Callable[[DeviceOps, torch.dtype, torch.device, int], Tensor]
) -> Finding:
    """Compare an operation by Triton with the same by torch on the CPU, for equal random numbers.

    ``run``: computes it with the operations, type, device and number of tokens that it is given.
    """
    from pdserve.model_runner.ops.triton_ops import TritonOps

    tokens = 3 if part.dry_run else 257
    expected = run(TorchOps(), dtype, torch.device("cpu"), tokens).float()
    found = run(TritonOps(), dtype, part.device, tokens).float().cpu()
    error = ((found - expected).abs() / expected.abs().clamp(min=1.0)).max().item()
    return Finding("", f"off by {error:.1e} at most", f"at most {TOLERANCE[dtype]:.0e}", error <= TOLERANCE[dtype])


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _norm_of(size: int, device: torch.device) -> RMSNorm:
    norm = RMSNorm(size, NormSpec(eps=1e-5, offset=1.0), device=device)
    norm.weight.copy_(_numbers(9, size) * 0.1)
    return norm


def _norm(ops: DeviceOps, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    return ops.norm(_norm_of(192, device), _numbers(0, tokens, 192).to(dtype).to(device))


def _head_norm(ops: DeviceOps, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    return ops.norm(_norm_of(64, device), _numbers(0, tokens, 3, 64).to(dtype).to(device))


def _add_and_norm(ops: DeviceOps, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    x, y = (_numbers(seed, tokens, 192).to(dtype).to(device) for seed in (1, 2))
    return ops.add_and_norm(x, y, 0.5, _norm_of(192, device), _norm_of(192, device))


def _rotate(ops: DeviceOps, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    rotary = RotaryEmbedding(RopeSpec(theta=10_000.0, rotary_dim=64), 64, dtype=dtype, device=device)
    q, k = (_numbers(heads, tokens, heads, 64).to(dtype).to(device) for heads in (6, 2))
    # Not farther: beyond, float32 itself tells angles apart less well than this asks for.
    rotation = ops.rotation(rotary, torch.arange(tokens, device=device))
    return torch.cat(ops.rotate(q, k, rotation), dim=1)


def _gate(ops: DeviceOps, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    return ops.gate_and_mul(_numbers(3, tokens, 2 * 192).to(dtype).to(device), Activation.SILU)


def _experts(ops: DeviceOps, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    count, chosen, inner, hidden = 8, 2, 96, 192
    stacks = [
        StackedLinear(count, columns, (rows,), bias=False, dtype=dtype, device=device)
        for columns, rows in ((hidden, 2 * inner), (inner, hidden))
    ]
    for stack in stacks:
        stack.weight.copy_(_numbers(5, *stack.weight.shape) / stack.weight.shape[2] ** 0.5)
    networks = ExpertNetworks(ExpertsSpec(count=count, chosen=chosen, inner=inner), *stacks)
    x, scores = _numbers(4, tokens, hidden).to(dtype).to(device), _numbers(6, tokens, count)
    best = scores.sort(descending=True)
    experts, weights = best.indices[:, :chosen], best.values[:, :chosen].softmax(-1)
    return ops.run_experts(x, networks, experts.to(device), weights.to(device))


OPS = {
    "norm": _norm,
    "norm of heads": _head_norm,
    "residual sum between two norms": _add_and_norm,
    "rotation": _rotate,
    "gated activation": _gate,
    "experts": _experts,
}


def _random_pages(count: int, layers: int, layer_bytes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (count, layers, layer_bytes), dtype=np.uint8)


def check_pages(part: Part) -> Finding:
    """Copy KV pages to a buffer and back, of all layers and of some, and compare them bit for bit."""
    from pdserve.model_runner.kv.triton.pages import gather_pages, scatter_pages

    pool = _random_pages(9, 3, 1032 if part.dry_run else 65_544)
    there, pages = torch.from_numpy(pool).to(part.device), np.array([4, 1, 8, 2], dtype=np.int32)
    numbers, wrong = torch.from_numpy(pages).to(part.device), 0
    for layers in (LayerRange(0, 3), LayerRange(1, 2)):
        wanted = pool[pages, layers.begin : layers.end]
        staging = torch.zeros(wanted.size, dtype=torch.uint8, device=part.device)
        gather_pages(there, numbers, layers, 3, staging)
        wrong += int((staging.cpu().numpy() != wanted.ravel()).sum())
        other = torch.zeros_like(there)
        scatter_pages(other, numbers, layers, 3, staging)
        expected = np.zeros_like(pool)
        expected[pages, layers.begin : layers.end] = wanted
        wrong += int((other.cpu().numpy() != expected).sum())
    return Finding("", f"{wrong} bytes wrong", "none", wrong == 0)


def check_checksum(part: Part) -> Finding:
    """Compare the checksum of pages that the device computes with the host's. Check that one changed bit changes it."""
    from pdserve.mem_cache.kv_pages.word_sum import host_checksum
    from pdserve.model_runner.kv.triton.checksum import page_checksum

    pool = _random_pages(9, 3, 1032 if part.dry_run else 65_544)
    pages = np.array([4, 1, 8, 2], dtype=np.int32)
    out = torch.zeros(1, dtype=torch.int64, device=part.device)

    def found() -> int:
        there = torch.from_numpy(pool).to(part.device)
        page_checksum(there, torch.from_numpy(pages).to(part.device), LayerRange(0, 3), 3, out)
        return int(out.item()) % 2**64

    before = found()
    same = before == host_checksum(pool[pages].ravel())
    pool[8, 2, 77] ^= 4
    noticed = found() != before
    text = f"{'the same' if same else 'another'}, a changed bit {'noticed' if noticed else 'not noticed'}"
    return Finding("", text, "the same, a changed bit noticed", same and noticed)


def check_transfer(part: Part) -> Finding:
    """Write pages to a KV pool and read them back while the device computes. Compare the bytes and report the speed."""
    device = open_device(str(part.device), strict=True)
    layers, count = (2, 4) if part.dry_run else (32, 64)
    layout = make_layout(KVShape(layers, 8, 128), 16, torch.bfloat16)
    pool = make_pool(layout, 2 * count + 1, part.device)
    page_bytes = layout.groups[0].page_bytes
    region = HostMemory(memoryview(device.host_zeros((2 * count * page_bytes,), torch.uint8).numpy().data))
    memory, pages = region.view(), PoolPages(pool, device)
    sent, back = memory[: count * page_bytes], memory[count * page_bytes :]
    sent[:] = np.random.default_rng(0).integers(0, 256, len(sent), dtype=np.uint8).data
    scattered = np.random.default_rng(1).permutation(2 * count)[:count] + 1

    def pieces(part_of: memoryview) -> list[Piece]:
        return [
            Piece(int(page) * page_bytes, part_of[i * page_bytes : (i + 1) * page_bytes])
            for i, page in enumerate(scattered)
        ]

    busy = torch.randn(16 if part.dry_run else 4096, 16 if part.dry_run else 4096, device=part.device)
    seconds = {"to the device": 0.0, "from it": 0.0}
    for _ in range(ROUNDS):
        busy = busy @ busy * 1e-3  # queued on the main stream, and not waited for
        begin = time.perf_counter()
        pages.write(pieces(sent))
        middle = time.perf_counter()
        pages.read(pieces(back))
        seconds["to the device"] += middle - begin
        seconds["from it"] += time.perf_counter() - middle
    device.synchronize()
    total = ROUNDS * count * page_bytes
    rates = ", ".join(f"{total / spent / 1e9:.1f} GB/s {way}" for way, spent in seconds.items())
    right = sent == back
    return Finding("", f"{'the same bytes' if right else 'OTHER BYTES'}; {rates}", "the same bytes", right)
