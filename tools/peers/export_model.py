"""``python -P -m tools.peers.export_model MODEL.gguf FOLDER``: a GGUF model as a Hugging Face folder in bf16.

The weights are those that the GGUF's blocks stand for, so every engine that reads the folder computes the same model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def export_model(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file to ``folder`` as Hugging Face files: bf16 safetensors, config and tokenizer."""
    dequantised = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False, dtype=torch.bfloat16
    )
    # A model that was loaded from a GGUF counts as quantised and refuses to be saved; one of the same shape does not.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.load_state_dict(dequantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False).save_pretrained(folder)


if __name__ == "__main__":
    export_model(Path(sys.argv[1]), Path(sys.argv[2]))
