"""The options of ``pdserve bench transfer``, declared once; the command line and YAML files read them here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...runtime.transfer_backends import BACKENDS
from ..errors import BenchOptionsError

HOST_BACKENDS = tuple(name for name, spec in BACKENDS.items() if not spec.stays_on_devices and not spec.moves_nothing)
"""Transfer backends that move pages of host memory, which is what is measured here."""

if TYPE_CHECKING:
    HostBackendName = str
else:
    HostBackendName = Literal[HOST_BACKENDS]
Contiguity = Literal["scattered", "adjacent"]


@dataclass(frozen=True, kw_only=True)
class TransferBenchOptions:
    """Options of ``pdserve bench transfer``.

    Parameters
    ----------
    backends
        Transfer backends to measure. One that is not installed is named and left out.
    page_bytes
        Bytes of a KV page: tokens of a page × layers × 2 × KV heads × head size × bytes of an element. The defaults are
        a power of two, and 16 tokens of SmolLM2-135M in bfloat16 and in float32.
    request_mib
        Sizes of a request's KV in MiB, each rounded to whole pages. Two pools are reserved, each of the largest.
    contiguity
        scattered: pages in an order drawn at random, no two of them neighbours on both sides. adjacent: one run.
    rounds
        How often the backends take turns; the medians over the rounds are shown.
    seconds
        How long each measurement of a round repeats its request, which runs once at least. With every backend there are
        16 measurements in a round, and as many rounds for each page size, request size and contiguity.
    output_json
        File for the results: what each round measured.
    """

    backends: list[HostBackendName] = field(default_factory=lambda: list(HOST_BACKENDS))
    page_bytes: list[int] = field(default_factory=lambda: [65536, 368640, 737280])
    request_mib: list[float] = field(default_factory=lambda: [1.0, 16.0, 64.0])
    contiguity: list[Contiguity] = field(default_factory=lambda: ["scattered", "adjacent"])
    rounds: int = 3
    seconds: float = 0.3
    output_json: Path | None = None

    def check(self) -> None:
        """Raise ``BenchOptionsError`` when these options can't work."""
        for name in ("backends", "page_bytes", "request_mib", "contiguity"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise BenchOptionsError(f"--{name.replace('_', '-')} takes one value or more, each of them once")
        if min(self.page_bytes) < 64:
            raise BenchOptionsError("--page-bytes must be 64 or more")
        if not all(0 < size < math.inf for size in self.request_mib):
            raise BenchOptionsError("--request-mib must be above 0")
        if self.rounds < 1:
            raise BenchOptionsError("--rounds must be 1 or more")
        if not 0 <= self.seconds < math.inf:
            raise BenchOptionsError("--seconds must be 0 or more")
