"""Whether Triton's kernels can run here."""

from __future__ import annotations

import torch


def triton_refusal(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on ``device`` in this process, or None if they can."""
    try:
        import triton
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] != "triton":
            raise
        return "Triton is not installed here; pip install 'pdserve[triton]'"
    is_interpreted = bool(triton.knobs.runtime.interpret)
    if device.type == "cpu" and not is_interpreted:
        return "Triton's kernels need an NVIDIA GPU, or TRITON_INTERPRET=1 to be interpreted on a CPU, for tests"
    if device.type not in ("cpu", "cuda"):
        return f"Triton's kernels do not run on {device.type}"
    return None
