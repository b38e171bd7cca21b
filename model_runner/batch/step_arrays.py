"""The device's copy of a step's arrays, at addresses that stay: a captured graph reads where it read before.

A step's copy is written to one of two areas of the host, since the copy before may still be on its way. It is sent in
one piece, behind all work that is queued on the device, and read by the step. Nothing waits. Two areas are enough
because one step at most is open while another is launched (``step_queue.py``).

Steps of few tokens, which graphs are captured of, have addresses that never change. Longer ones share an area that
grows.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..device.base import Device
from .step_plan import I64, StepPlan


class _Array(IntEnum):
    INPUT_IDS = 0
    POSITIONS = 1
    OUT_CACHE_LOC = 2
    TOKEN_ROWS = 3
    ROWS = 4
    LAST_AT = 5
    LAST_ROWS = 6
    LOGIT_INDICES = 7
    SAMPLED_ROWS = 8
    SAMPLED_POSITIONS = 9
    BEGUN_AT = 10


class DeviceArrays(NamedTuple):
    """int64, as in ``StepPlan``; valid until the next step is loaded."""

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    token_rows: Tensor
    rows: Tensor
    last_at: Tensor
    last_rows: Tensor
    logit_indices: Tensor
    sampled_rows: Tensor
    sampled_positions: Tensor
    begun_at: Tensor


class PaddedArrays(NamedTuple):
    """What a graph of [S] entries of a token each reads; the same tensors for every step of that size."""

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    rows: Tensor


_PADDED = (_Array.INPUT_IDS, _Array.POSITIONS, _Array.OUT_CACHE_LOC, _Array.ROWS)


class _Area:
    """Room for arrays of up to ``capacity`` numbers each."""

    def __init__(self, device: Device, capacity: int) -> None:
        # Each array begins at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that do not.
        shape = (len(_Array), capacity + capacity % 2)
        self.capacity = capacity
        self.arrays = torch.zeros(shape, dtype=torch.int64, device=device.torch)
        self._device = device
        self._hosts = [device.host_zeros(shape, torch.int64) for _ in range(2)]
        self._turn = 0

    def load(self, arrays: list[I64], padded_to: int) -> DeviceArrays:
        self._turn = (self._turn + 1) % len(self._hosts)
        here = self._hosts[self._turn]
        written = here.numpy()
        for which, array in enumerate(arrays):
            written[which, : len(array)] = array
        for which in _PADDED:
            written[which, len(arrays[which]) : padded_to] = 0
        self._device.send(self.arrays, here)
        return DeviceArrays(*(self.arrays[which, : len(array)] for which, array in enumerate(arrays)))

    def padded(self, size: int) -> PaddedArrays:
        return PaddedArrays(*(self.arrays[which, :size] for which in _PADDED))


class StepArrays:
    """Owner of the areas: one for steps of up to ``capacity`` tokens, which never moves, and one for longer ones."""

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._small = self._large = _Area(device, capacity)

    @property
    def capacity(self) -> int:
        """Maximum tokens of a step for which the arrays' addresses never change."""
        return self._small.capacity

    def load(self, plan: StepPlan, padded_to: int = 0) -> DeviceArrays:
        """Queue the copy of the plan's arrays to the device, behind earlier work, and return the device's arrays.

        ``padded_to`` (at most ``capacity``): number of tokens after padding; 0: no padding. A padding token is token 0
        at position 0, in slot 0, of row 0. A step of more than ``capacity`` tokens gets arrays at other addresses.
        """
        arrays = [
            plan.input_ids,
            plan.positions,
            plan.out_cache_loc,
            plan.token_rows,
            plan.rows,
            plan.last_at,
            plan.last_rows,
            plan.logit_indices,
            plan.sampled_rows,
            plan.sampled_positions,
            plan.begun_at,
        ]
        longest = max(len(array) for array in arrays)
        if longest <= self._small.capacity:
            return self._small.load(arrays, padded_to)
        if longest > self._large.capacity:
            # Its size depends on the longest step alone, and the old one goes first: so the most that it ever takes is
            # known before (``step_memory.py``).
            self._large = self._small
            self._large = _Area(self._device, 1 << (longest - 1).bit_length())
        return self._large.load(arrays, padded_to)

    def padded(self, size: int) -> PaddedArrays:
        """Return the device arrays that a graph of ``size`` tokens reads, padding included.

        Their addresses never change.
        """
        return self._small.padded(size)

    def clear(self) -> None:
        """Queue a write of padding to all ``capacity`` tokens of the arrays that graphs read.

        A padding token is token 0 at position 0, in slot 0, of row 0.
        """
        nothing = np.empty(0, dtype=np.int64)
        self._small.load([nothing] * len(_Array), self._small.capacity)
