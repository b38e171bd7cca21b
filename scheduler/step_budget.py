"""How many prompt tokens a step may compute.

A step with prompt pieces takes longer than one of decodes alone, and every request that decodes waits for it. On a CPU
a piece of a hundred tokens already uses all of its arithmetic, so small steps cost nothing there and keep the gaps
between tokens short; an accelerator wants larger ones. A decode instance exists for short gaps, and a prompt that it
computes itself is the exception.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.options import ServerOptions

CPU_CHUNK = 512
CPU_MIXED_CHUNK = 128
DECODE_MIXED_CHUNK = 16
CHUNK = 2048


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Prompt tokens a step: ``alone`` without and ``mixed`` with requests that decode in it.

    ``may_cut``: whether a prompt may be computed in pieces.
    """

    alone: int
    mixed: int
    may_cut: bool

    @classmethod
    def of(cls, options: ServerOptions, device: str) -> StepBudget:
        """What the options say, or what suits the worker's ``device``."""
        chunk, mixed, most = options.chunked_prefill_size, options.mixed_chunk_size, options.max_prefill_tokens
        if chunk == -1:
            return cls(most, most, may_cut=False)
        on_cpu = device.startswith("cpu")
        if chunk is None:
            chunk = _pages_up(CPU_CHUNK if on_cpu else CHUNK, options.page_size)
        if mixed is None:
            on_decode = options.disaggregation_mode == "decode"
            mixed = DECODE_MIXED_CHUNK if on_decode else _pages_up(CPU_MIXED_CHUNK, options.page_size)
            mixed = mixed if on_cpu else chunk
        return cls(min(chunk, most), min(mixed, chunk, most), may_cut=True)

    def tokens(self, *, decoding: bool) -> int:
        """The budget of one step; ``decoding``: whether requests decode in it."""
        return self.mixed if decoding else self.alone


def _pages_up(tokens: int, page_size: int) -> int:
    """A piece that ends within a page leaves tokens that can't be shared or pushed yet."""
    return max(tokens, page_size)
