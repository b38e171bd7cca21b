"""A pair with the real model, and the environment that ``make test-clients`` made for the clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import MODEL
from support.processes import Pair, pd_pair
from support.quick_gguf import quick_gguf


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """In float32, so that scores can be those of transformers; everything comes back in the end."""
    with pd_pair(tmp_path_factory.mktemp("pair"), "tcp", "--dtype", "float32") as pair:
        yield pair
        pair.assert_all_returned()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model as a Hugging Face folder: the same weights, dequantised to float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pdserve.model_files.model_path import resolve_model

    file = resolve_model(MODEL).path
    folder = tmp_path_factory.mktemp("model")
    with quick_gguf():
        dequantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    # One that was loaded from a GGUF counts as quantised and refuses to be saved; one of the same shape does not.
    config = dequantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dequantised.state_dict())
    model.save_pretrained(folder)
    return folder
