"""Chooses the sampler of a device."""

from __future__ import annotations

import importlib.util
import logging

import torch
from torch import Tensor

from ...device.base import Device
from ..rows import RowStates
from .base import DeviceSampler
from .torch_sampler import TorchSampler

log = logging.getLogger(__name__)


def choose_sampler(device: Device, states: RowStates[Tensor], logits_dtype: torch.dtype) -> DeviceSampler:
    """Return the sampler for ``device``: Triton's kernels on CUDA, else operations of torch.

    CUDA without Triton, or with too large a vocabulary for the kernels, also gets torch's. ``logits_dtype``: type of
    the logits to come.
    """
    if device.torch.type != "cuda" or importlib.util.find_spec("triton") is None:
        return TorchSampler(device, states)
    # Imported here: Triton is no dependency.
    from ..triton.draw_math import MAX_VOCAB
    from .triton_sampler import TritonSampler

    if states.vocab_size > MAX_VOCAB:
        log.warning("Triton's sampler takes %d tokens at most: operations of torch choose here", MAX_VOCAB)
        return TorchSampler(device, states)
    return TritonSampler(device, states, logits_dtype)
