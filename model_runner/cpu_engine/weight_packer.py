"""Packs weights into the panels that the CPU kernels multiply with.

An engine reads packed weights where they lie, so they may be packed by another process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import c_int64
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...model_files.sharding import Slice
from ...model_files.spec import ModelSpec
from .library import NATIVE_DTYPES, NATIVE_KV_DTYPES, ActivationDType, load_library
from .lowering import lower
from .structs import WeightPart
from .team import Team

ALIGNMENT = 64
"""Bytes that weights are aligned to: a line of the caches."""


class LinearKind(IntEnum):
    """``LinearKind`` of engine.h."""

    QKV = 0
    O = 1  # noqa: E741 - the layer's name
    GATE_UP = 2
    DOWN = 3
    HEAD = 4
    ROUTER = 5
    QB = 6
    KB = 7
    VB = 8


class LinearPlace(NamedTuple):
    """Where a model has a linear layer."""

    kind: LinearKind
    layer: int
    """Number of the layer; 0 for the head."""
    expert: int = 0
    """Number of the expert, of which the shared one is the last; number of the head for KB and VB."""


class PackedArrays(NamedTuple):
    """A packed weight."""

    panels: npt.NDArray[np.uint8]
    bias: npt.NDArray[np.float32] | None
    """Bias with the padding of the panels; None: the layer has none."""


class WeightPacker:
    """Packs weights of the model ``spec`` for engines with activations of ``dtype`` over a pool of ``kv_dtype``.

    Both are names of torch's types. Raises ``BuildError`` if the kernels can't be built.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: str,
        kv_dtype: str,
        team: Team,
        vocab: Slice | None = None,
        activations: ActivationDType = ActivationDType.INT16,
    ) -> None:
        """Prepare to pack weights of a rank's part ``spec`` on the threads of ``team``.

        ``vocab``: rows of the LM head that the rank has; None: all. ``activations``: the type that activations are
        rounded to if weights are quantised. Raises ``MemoryError``.
        """
        self._library = load_library()
        self.team = team
        """Threads that pack."""
        lowered = lower(spec, dtype, vocab, activations)
        handle = self._library.pds_packer_new(
            lowered.model, lowered.layers, NATIVE_DTYPES[dtype], NATIVE_KV_DTYPES[kv_dtype], team.handle
        )
        if handle is None:
            raise MemoryError("no memory to pack the weights")
        self._handle = handle
        self.close = weakref.finalize(self, self._library.pds_packer_free, handle)

    def pack(
        self, place: LinearPlace, parts: Sequence[WeightPart], bias: npt.NDArray[np.float32] | None
    ) -> PackedArrays:
        """Return the weight [N, K] of ``parts``, stacked by rows, as packed panels, and its padded ``bias`` [N].

        A ROUTER is one part, [N, K] float32, with the gate of the shared expert as its last row. Raises ``ValueError``
        if the parts can't lie side by side in panels, and ``MemoryError``.
        """
        described = (self._handle, *place, len(parts), (WeightPart * len(parts))(*parts))
        sizes = (c_int64 * 2)()
        answer = self._library.pds_packer_size(*described, sizes)
        if answer > 0:
            raise ValueError(f"the parts of {place} can't lie side by side in panels")
        panels = aligned_bytes(sizes[0])
        packed_bias = None if bias is None else np.empty(sizes[1], dtype=np.float32)
        addresses = (_address(bias), panels.ctypes.data, _address(packed_bias))
        if answer < 0 or self._library.pds_packer_pack(*described, *addresses) != 0:
            raise MemoryError("no memory to pack the weights")
        return PackedArrays(panels, packed_bias)


def aligned_bytes(count: int) -> npt.NDArray[np.uint8]:
    """Return ``count`` uninitialised bytes that begin at a multiple of ``ALIGNMENT``, a cache line."""
    room = np.empty(count + ALIGNMENT, dtype=np.uint8)
    skipped = -room.ctypes.data % ALIGNMENT
    return room[skipped : skipped + count]


def _address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data
