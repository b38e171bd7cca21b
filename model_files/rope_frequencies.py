"""Frequencies and factors of rotary position embedding (Su et al., 2021) and its stretched variants, without torch.

Arithmetic is float32, operation by operation as transformers does it in torch: an error of a frequency is multiplied by
the position.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .spec import RopeSpec, RopeType

F32 = npt.NDArray[np.float32]


def inverse_frequencies(rope: RopeSpec) -> F32:
    """Return the radians per token of each of the rotary_dim / 2 pairs.

    Raises ``ValueError`` if longrope's factors are not chosen yet.
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    # In float64, and rounded: the nearest float32. NumPy's own power of float32 is not.
    powers = np.power(float(np.float32(rope.theta)), exponents.astype(np.float64)).astype(np.float32)
    inv_freq: F32 = np.float32(1.0) / powers
    match rope.type:
        case RopeType.LINEAR:
            inv_freq = inv_freq / np.float32(rope.factor)
        case RopeType.LLAMA3:
            inv_freq = _llama3(inv_freq, rope)
        case RopeType.YARN:
            inv_freq = _yarn(inv_freq, rope)
        case RopeType.DEFAULT | RopeType.LONGROPE:
            pass
    if rope.long_factors:
        raise ValueError("with_context() has not chosen between the short factors and the long ones")
    if rope.freq_factors:
        inv_freq = np.divide(inv_freq, np.array(rope.freq_factors, dtype=np.float32))
    return inv_freq


def attention_factor(rope: RopeSpec) -> float:
    """Return the factor of cosines and sines, by which YaRN and LongRoPE sharpen attention; 1 for other types."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type != RopeType.YARN or rope.factor <= 1:
        return 1.0
    return 0.1 * math.log(rope.factor) + 1.0


def _llama3(inv_freq: F32, rope: RopeSpec) -> F32:
    """Divide the frequencies of long waves by the factor, keep short waves, and blend those between (Llama 3.1)."""
    # Torch divides a number by a tensor as the tensor's reciprocal times the number.
    wavelength = np.float32(2 * math.pi) * (np.float32(1) / inv_freq)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = np.float32(rope.original_context) * (np.float32(1) / wavelength)
    blend = np.clip((turns - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    blended: F32 = (np.float32(1) - blend) * inv_freq / np.float32(rope.factor) + blend * inv_freq
    return blended


def _yarn(inv_freq: F32, rope: RopeSpec) -> F32:
    """Stretch the frequencies by YaRN (Peng et al., 2023).

    Pairs that turn often in the trained context stay as they are; those that turn rarely are stretched.
    """
    dim = rope.rotary_dim

    def pair_that_turns(times: float) -> float:
        turns = rope.original_context / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pairs = np.arange(dim // 2, dtype=np.float32)
    # Where both are the same pair, the step from one to the other is a steep one.
    steps = (pairs - np.float32(first)) / np.float32(last - first or 0.001)
    stretch = np.clip(steps, np.float32(0), np.float32(1))
    stretched: F32 = stretch * inv_freq / np.float32(rope.factor) + (np.float32(1) - stretch) * inv_freq
    return stretched
