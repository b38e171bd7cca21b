"""The CPU kernels one by one, to be tested and measured; the engine calls them by itself.

Shapes: M rows of activations, N outputs, K inputs, H heads, D head_dim.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...model_files.spec import ExpertsSpec
from .library import ActivationDType, load_library
from .lowering import lower_experts

PANEL = 32
DENSE = 0


class PackedWeight:
    """A weight [N, K], packed: a tensor in the activations' ``dtype``, or uint8 GGUF blocks of ``block_format``."""

    def __init__(
        self, weight: Tensor | npt.NDArray[np.uint8], n: int, k: int, dtype: torch.dtype, block_format: int = DENSE
    ) -> None:
        self._library = load_library()
        self._shape = (int(dtype == torch.bfloat16), block_format)
        self._size = (n, k)
        sizes = (*self._shape, *map(ctypes.c_int64, self._size))
        self.nbytes: int = self._library.pds_packed_bytes(*sizes)
        # On a cache line of its own.
        self._memory = torch.empty(self.nbytes + 64, dtype=torch.uint8)
        self._packed = ctypes.c_void_p(-(-self._memory.data_ptr() // 64) * 64)
        source = weight.data_ptr() if isinstance(weight, Tensor) else weight.ctypes.data
        self._library.pds_pack(*self._shape, ctypes.c_void_p(source), *sizes[2:], self._packed)

    def multiply(self, a: Tensor, activations: ActivationDType = ActivationDType.INT16) -> Tensor:
        """Return the product of ``a`` [M, K] and the transposed weight, [M, N] float32.

        ``activations``: the type that ``a`` is rounded to if the weight consists of quantised blocks.
        """
        n, k = self._size
        out = torch.empty(a.shape[0], -(-n // PANEL) * PANEL)
        self._library.pds_multiply(
            *self._shape,
            int(activations),
            self._packed,
            ctypes.c_int64(n),
            ctypes.c_int64(k),
            ctypes.c_void_p(a.data_ptr()),
            ctypes.c_int64(a.stride(0)),
            ctypes.c_int64(a.shape[0]),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out[:, :n]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` [M, N] divided by each row's root mean square (with ``eps``), times ``weight`` [N] float32."""
    out = torch.empty_like(x)
    load_library().pds_rms_norm(
        int(x.dtype == torch.bfloat16),
        _pointer(x),
        _pointer(weight),
        ctypes.c_float(eps),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_int64(x.shape[1]),
        _pointer(out),
    )
    return out


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return a copy of ``heads`` [H, D], rotated by the angles with these ``cos`` and ``sin`` [D / 2] float32."""
    out = heads.clone()
    load_library().pds_rope(
        int(heads.dtype == torch.bfloat16),
        _pointer(out),
        _pointer(cos),
        _pointer(sin),
        ctypes.c_int64(heads.shape[0]),
        ctypes.c_int64(heads.shape[1]),
    )
    return out


class Function(IntEnum):
    """What ``apply`` computes: the activations of layer_ops.h, and what caps are made of."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    TANH = 3


def apply(function: Function, x: Tensor) -> Tensor:
    """Return ``function`` of each element of ``x``, a float32 tensor with a multiple of 16 elements."""
    out = torch.empty_like(x)
    load_library().pds_activate(int(function), _pointer(x), ctypes.c_int64(x.numel()), _pointer(out))
    return out


def choose_experts(spec: ExpertsSpec, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts of each token, best first, and their weights, both [T, C].

    ``logits``: the router's, [T, E] float32. ``bias``: [E], added to scores for the choice alone, or None.
    """
    rows, count = logits.shape
    padded = -(-count // PANEL) * PANEL
    logits = torch.nn.functional.pad(logits, (0, padded - count))
    room = torch.empty(2 * (padded + spec.groups))
    experts, weights = torch.empty(rows, spec.chosen, dtype=torch.int32), torch.empty(rows, spec.chosen)
    load_library().pds_choose_experts(
        ctypes.byref(lower_experts(spec)),
        _pointer(logits),
        ctypes.c_int64(padded),
        ctypes.c_int64(rows),
        ctypes.c_void_p(None) if bias is None else _pointer(bias),
        _pointer(room),
        _pointer(experts),
        _pointer(weights),
    )
    return experts.long(), weights


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
