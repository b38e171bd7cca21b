"""The function that makes each kernel's case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .attention import attention
from .case import Ask, Case, Place
from .facts import KernelName
from .products import experts, fp8, int4, norm

CASES: dict[KernelName, Callable[[Ask, Place], Case]] = {
    "decode": attention,
    "prefill": attention,
    "int4": int4,
    "fp8": fp8,
    "experts_up": partial(experts, is_up=True),
    "experts_down": partial(experts, is_up=False),
    "norm": norm,
}
