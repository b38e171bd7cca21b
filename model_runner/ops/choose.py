"""Chooses the ops of a device."""

from __future__ import annotations

import importlib.util
import logging

import torch

from .base import DeviceOps
from .torch_ops import TorchOps

log = logging.getLogger(__name__)


def choose_ops(device: torch.device) -> DeviceOps:
    """Return Triton's operations on a CUDA device if Triton is installed, else torch's.

    Warn if a CUDA device has to do without Triton.
    """
    if device.type != "cuda":
        return TorchOps()
    if importlib.util.find_spec("triton") is None:
        log.warning("norms and rotations run as single operations of torch: pip install 'pdserve[triton]' fuses them")
        return TorchOps()
    # Imported here: Triton is no dependency.
    from .triton_ops import TritonOps

    return TritonOps()
