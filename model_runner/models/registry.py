"""Models by family."""

from __future__ import annotations

import torch

from ...model_files.config import ModelConfig
from .llama import LlamaForCausalLM


def make_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """An unloaded model for ``config``. Every family there is runs on the Llama model."""
    return LlamaForCausalLM(config, dtype, device)
