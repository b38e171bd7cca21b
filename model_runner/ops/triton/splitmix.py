"""splitmix64's mixer on a device: spreads the bits of counters, for random numbers and checksums."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(bits: tl.tensor) -> tl.tensor:
    """Return uint64 ``bits`` mixed by splitmix64's finaliser, as ``runtime/splitmix.py`` does; a bijection."""
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)
