"""The options of ``pdserve bench kernel``, declared once; the command line and YAML files read them here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import BenchOptionsError
from .facts import KERNELS, MAY_BE_ZERO, KernelName

DTypeName = Literal["bfloat16", "float16", "float32"]
MAX_SIZE = 1 << 24
"""Maximum value of one size of a shape or tile."""


@dataclass(frozen=True, kw_only=True)
class KernelBenchOptions:
    """Options of ``pdserve bench kernel``.

    Parameters
    ----------
    kernel
        The kernel: attention of decode steps or of prompts, products with packed weights or of experts, or a norm.
    shape
        Sizes that differ from the defaults, as NAME=NUMBER: rows=64 context=8192. An unknown name lists those that the
        kernel has.
    variant
        Kind of weights or of KV elements; default: the first. An unknown one lists those that the kernel has.
    tile
        Tile sizes that differ from what the server would choose, as NAME=NUMBER: M=32 num_stages=4.
    dtype
        Type of activations, and of KV in the variant "plain".
    capability
        Compute capability to compile for, times ten: 90 is an H100. Default: that of the GPU here, or 90.
    seconds
        Duration of the measurement on a GPU.
    output_json
        File for the results.
    """

    kernel: KernelName = "decode"
    shape: list[str] = field(default_factory=list)
    variant: str | None = None
    tile: list[str] = field(default_factory=list)
    dtype: DTypeName = "bfloat16"
    capability: int | None = None
    seconds: float = 1.0
    output_json: Path | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Return the whole shape: the kernel's default sizes, with those of --shape in their place."""
        return KERNELS[self.kernel].shape | _numbers("--shape", self.shape, KERNELS[self.kernel].shape)

    @property
    def tile_sizes(self) -> dict[str, int]:
        """Return the tile sizes that --tile gives, without defaults."""
        return _numbers("--tile", self.tile, KERNELS[self.kernel].tile)

    @property
    def chosen_variant(self) -> str:
        """Return the variant that was given, or the kernel's first one."""
        return KERNELS[self.kernel].variants[0] if self.variant is None else self.variant

    def check(self) -> None:
        """Raise ``BenchOptionsError`` when these options can't work."""
        facts, sizes, _ = KERNELS[self.kernel], self.sizes, self.tile_sizes
        if self.chosen_variant not in facts.variants:
            raise BenchOptionsError(f"--variant {self.variant}: {self.kernel} has {', '.join(facts.variants)}")
        if self.capability is not None and not 75 <= self.capability <= 129:
            raise BenchOptionsError(f"--capability is {self.capability}: it is 75 to 129, as 90 for an H100")
        if not 0 < self.seconds < math.inf:
            raise BenchOptionsError(f"--seconds is {self.seconds:g}: it must be above 0")
        for name, of in (("heads", "kv_heads"), ("inputs", "group")):
            if name in sizes and of in sizes and sizes[name] % sizes[of]:
                raise BenchOptionsError(f"--shape {name}={sizes[name]}: it must be a multiple of {of}, {sizes[of]}")
        if sizes.get("chosen", 0) > sizes.get("experts", 0):
            raise BenchOptionsError(f"--shape chosen={sizes['chosen']}: there are {sizes['experts']} experts")
        if sizes.get("group", 32) % 32:
            raise BenchOptionsError(f"--shape group={sizes['group']}: it must be a multiple of 32")


def _numbers(flag: str, given: Iterable[str], known: Iterable[str]) -> dict[str, int]:
    """Parse entries NAME=NUMBER of option ``flag`` into a dict.

    Raises ``BenchOptionsError`` for a name that is not in ``known``, or a number out of range.
    """
    numbers = {}
    for entry in given:
        name, _, text = entry.partition("=")
        if name not in known:
            names = ", ".join(known)
            raise BenchOptionsError(f"{flag} {entry}: write NAME=NUMBER with one of {names or 'no name: it is fixed'}")
        least = 0 if name in MAY_BE_ZERO else 1
        if not text.isdecimal() or not least <= int(text) <= MAX_SIZE:
            raise BenchOptionsError(f"{flag} {entry}: the number is {least} to {MAX_SIZE}")
        numbers[name] = int(text)
    return numbers
