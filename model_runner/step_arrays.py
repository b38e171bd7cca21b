"""The device's copy of a step's arrays, at addresses that stay: a captured graph reads where it read before.

Life of a step's copy: written to one of two pinned areas of the host (the copy before may still be on its way), sent to
the device behind all work that is queued there, read by the step. Nobody waits. On the CPU the two are one, and nothing
is sent.

Steps of few tokens, which graphs are captured of, have addresses that never change. Longer ones share an area that
grows.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

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


class _Area:
    """Room for arrays of up to ``capacity`` numbers each."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        shape = (len(_Array), capacity)
        self.capacity = capacity
        self.arrays = torch.zeros(shape, dtype=torch.int64, device=device)
        self._hosts: list[Tensor] = []
        self._turn = 0
        if device.type != "cpu":
            pinned = device.type == "cuda"
            self._hosts = [torch.zeros(shape, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]

    def load(self, arrays: dict[_Array, I64]) -> DeviceArrays:
        self._turn = 1 - self._turn
        return DeviceArrays(*(self._put(which, arrays[which]) for which in _Array))

    def _put(self, which: _Array, array: I64) -> Tensor:
        there = self.arrays[which, : len(array)]
        if self._hosts:
            host = self._hosts[self._turn][which, : len(array)]
            host.copy_(torch.from_numpy(array))
            there.copy_(host, non_blocking=True)
        else:
            there.copy_(torch.from_numpy(array))
        return there


class StepArrays:
    """Owner of the areas: one for steps of up to ``capacity`` tokens, which never moves, and one for longer ones."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        self._small = self._large = _Area(device, capacity)

    def load(self, plan: StepPlan) -> DeviceArrays:
        """The plan's arrays on the device, behind what is queued there."""
        arrays: dict[_Array, I64] = {
            _Array.INPUT_IDS: plan.input_ids,
            _Array.POSITIONS: plan.positions,
            _Array.OUT_CACHE_LOC: plan.out_cache_loc,
            _Array.TOKEN_ROWS: plan.token_rows,
            _Array.ROWS: plan.rows,
            _Array.LAST_AT: plan.last_at,
            _Array.LAST_ROWS: plan.last_rows,
            _Array.LOGIT_INDICES: plan.logit_indices,
            _Array.SAMPLED_ROWS: plan.sampled_rows,
        }
        longest = max(len(array) for array in arrays.values())
        if longest <= self._small.capacity:
            return self._small.load(arrays)
        if longest > self._large.capacity:
            self._large = _Area(self._device, max(longest, 2 * self._large.capacity))
        return self._large.load(arrays)
