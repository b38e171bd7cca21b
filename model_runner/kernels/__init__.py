"""The kernels that the layers call."""

from .reference import linear, rms_norm, rope, silu_and_mul, store_kv

__all__ = ["linear", "rms_norm", "rope", "silu_and_mul", "store_kv"]
