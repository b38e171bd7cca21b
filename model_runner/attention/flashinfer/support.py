"""What FlashInfer can be asked for, known without it: why a model can't be served with it, and how it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence

import torch
from packaging.version import Version

from ....model_files.spec import AttentionSpec, MLASpec
from ...kv.quantization import LARGEST

LEAST, BELOW = Version("0.7"), Version("0.8")
INSTALL = "pip install 'pdserve[flashinfer]', or flashinfer-python>=0.7,<0.8 by itself"
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
LATENT_DIMS = (512, 64)


def missing() -> str | None:
    """Return why FlashInfer can't be imported here, with what to do; None if it can be imported."""
    if importlib.util.find_spec("flashinfer") is None:
        return f"FlashInfer is not installed: {INSTALL}"
    try:
        found = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return f"the flashinfer that is installed is not flashinfer-python: {INSTALL}"
    if not LEAST <= Version(found) < BELOW:
        return f"flashinfer-python {found} is installed, and its calls differ from release to release: {INSTALL}"
    return None


def unsupported(attentions: Sequence[AttentionSpec | MLASpec], dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Return why FlashInfer's kernels can't compute these layers with these types, or None if they can."""
    if dtype not in DTYPES:
        return f"it computes in float16 and bfloat16, not in {_name(dtype)}"
    if kv_dtype in LARGEST:
        return f"KV of {_name(kv_dtype)} has a scale for each token and head here, and one for all of them there"
    if kv_dtype != dtype:
        return f"KV of {_name(kv_dtype)} beside {_name(dtype)}: it wants both of one type"
    for spec in attentions:
        if isinstance(spec, MLASpec):
            if (spec.kv_lora_rank, spec.qk_rope_head_dim) != LATENT_DIMS:
                return f"latent rows of {spec.kv_lora_rank} + {spec.qk_rope_head_dim} elements, not 512 + 64"
        elif spec.head_dim not in HEAD_DIMS:
            return f"heads of {spec.head_dim} elements, not of 64, 128 or 256"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
