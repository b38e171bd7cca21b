"""Notes the kernels that a piece of work launches, and the variant of each, with a GPU or without one.

Triton makes a variant of a launch's arguments: types, constants, and whether integers and addresses are multiples of
16. Its own code does so here. Without a GPU a hook ends the launch before anything is compiled; results are then what
their memory holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ...model_runner.device.triton_compiler import CompileRequest


class _NoGPU:
    """A driver that answers what a launch asks before it is compiled."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def launched(run: Callable[[], object], capability: int, *, has_gpu: bool) -> list[CompileRequest]:
    """Call ``run``, and return the kernel variants that it launches for the first time in this process, in order.

    Without a GPU they are neither compiled nor run, as for one of ``capability`` (times ten).
    """
    found: list[CompileRequest] = []

    def note(*, fn: Any, compile: dict[str, Any], **_more: Any) -> bool:
        found.append(_request(fn, compile, capability))
        return not has_gpu

    with _hooked(note, None if has_gpu else _NoGPU(capability)):
        run()
    return found


@contextmanager
def on_paper(capability: int) -> Iterator[None]:
    """Make kernel launches in the block do nothing, as if for a GPU of ``capability`` (times ten).

    It lets a case be prepared where there is no GPU.
    """
    with _hooked(lambda **_more: True, _NoGPU(capability)):
        yield


@contextmanager
def _hooked(hook: Callable[..., bool], without: _NoGPU | None) -> Iterator[None]:
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        with nullcontext() if without is None else _driven_by(without), warnings.catch_warnings():
            # A default of Triton's that will change; what is compiled here says what it wants.
            warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
            yield
    finally:
        knobs.runtime.jit_cache_hook = before


@contextmanager
def _driven_by(stand_in: _NoGPU) -> Iterator[None]:
    active = driver._active
    driver._active = stand_in
    try:
        yield
    finally:
        driver._active = active


def _request(fn: Any, variant: dict[str, Any], capability: int) -> CompileRequest:
    names: list[str] = fn.jit_function.arg_names
    [attributes] = variant["configs"]
    divisible = {names[place[0]] for place, found in attributes.items() if ["tt.divisibility", 16] in found}
    types = {name: kind for name, kind in variant["signature"].items() if kind != "constexpr"}
    return CompileRequest(
        kernel=f"{fn.module}:{fn.name}",
        types=types,
        constants={names[place[0]]: value for place, value in variant["constants"].items()},
        capability=capability,
        num_warps=variant["num_warps"],
        num_stages=variant["num_stages"],
        divisible=tuple(name for name in types if name in divisible and not types[name].startswith("*")),
    )
