"""Variants of Triton's kernels that are asked for, as on an H100, with nothing compiled and nothing launched.

Triton makes a variant's key from each launch's arguments: types, constants, whether integers are 1 or multiples of 16,
whether addresses are multiples of 16. Its own code does so here; then a hook ends the launch. Results are what their
memory holds, so a step's tokens mean nothing, and the variants of steps must not depend on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

Variant = tuple[str, str]
"""A kernel's name, and the key of its variant."""


class _NoGPU:
    """What a launch asks of a driver before it is compiled."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def variants_asked_for() -> Iterator[set[Variant]]:
    """Collect the variants of all launches in the block; the launches do nothing else."""
    asked: set[Variant] = set()

    def note(*, key, fn, **_more) -> bool:
        asked.add((fn.name, str(key)))
        return True  # "compiled elsewhere"

    before, active = knobs.runtime.jit_cache_hook, driver._active
    driver._active = _NoGPU()
    knobs.runtime.jit_cache_hook = note
    try:
        with warnings.catch_warnings():
            # Triton's default for fused products will change; that is no matter here.
            warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
            yield asked
    finally:
        knobs.runtime.jit_cache_hook = before
        driver._active = active
