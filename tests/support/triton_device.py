"""Where this process runs Triton's kernels."""

from __future__ import annotations

import os

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAN_RUN = INTERPRETED or torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def there(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Copy an array to the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)) if isinstance(array, np.ndarray) else array
    return tensor.to(DEVICE, copy=True)
