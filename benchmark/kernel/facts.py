"""The kernels that ``pdserve bench kernel`` knows: their shapes, variants and tiles. Imports no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

KernelName = Literal["decode", "prefill", "int4", "fp8", "experts_up", "experts_down", "norm"]

PRODUCT_TILE = ("M", "N", "K", "num_warps", "num_stages")


class KernelFacts(NamedTuple):
    """One kernel's parameters."""

    shape: dict[str, int]
    """Names of the sizes that decide the work, with their defaults: those of a model of 8B, or of Mixtral 8x7B."""
    variants: tuple[str, ...]
    """The first is the default."""
    tile: tuple[str, ...]
    """Names of the sizes that decide how the work is divided; () if they are fixed."""


KERNELS: dict[KernelName, KernelFacts] = {
    "decode": KernelFacts(
        {"rows": 8, "context": 1024, "heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "window": 0},
        ("plain", "int8", "fp8_e4m3", "fp8_e5m2"),
        ("block_h", "block_n", "num_warps", "num_stages", "least_split", "programs"),
    ),
    "prefill": KernelFacts(
        {"tokens": 2048, "cached": 0, "heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "window": 0},
        ("plain", "int8", "fp8_e4m3", "fp8_e5m2"),
        ("block_m", "block_n", "num_warps", "num_stages"),
    ),
    "int4": KernelFacts(
        {"tokens": 1, "inputs": 4096, "outputs": 28672, "group": 128}, ("symmetric", "zeros"), PRODUCT_TILE
    ),
    "fp8": KernelFacts(
        {"tokens": 1, "inputs": 4096, "outputs": 28672}, ("blocks", "rows", "blocks-w8a8", "rows-w8a8"), PRODUCT_TILE
    ),
    "experts_up": KernelFacts(
        {"tokens": 8, "experts": 8, "chosen": 2, "inner": 14336, "hidden": 4096}, ("plain",), PRODUCT_TILE
    ),
    "experts_down": KernelFacts(
        {"tokens": 8, "experts": 8, "chosen": 2, "inner": 14336, "hidden": 4096}, ("plain",), PRODUCT_TILE
    ),
    "norm": KernelFacts({"tokens": 8, "width": 4096}, ("plain",), ()),
}
assert tuple(KERNELS) == get_args(KernelName)
MAY_BE_ZERO = frozenset({"cached", "window"})
