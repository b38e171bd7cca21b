"""A model's ``generation_config.json``: what is taken from it, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.model_files.errors import ModelError
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.sampling_defaults import SamplingDefaults, read_sampling_defaults


def read(folder: Path, content: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_sampling_defaults(ModelSource("hf", folder))


def test_what_there_is_is_taken(tmp_path: Path) -> None:
    qwen = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    assert read(tmp_path, qwen).given == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert read(tmp_path, {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.1}).given == {
        "top_p": 1.0,
        "repetition_penalty": 1.1,
    }
    assert read(tmp_path, {"temperature": 0}).given == {"temperature": 0}


def test_no_file_and_a_gguf_have_none(tmp_path: Path) -> None:
    assert read_sampling_defaults(ModelSource("hf", tmp_path)).given == {}
    assert read_sampling_defaults(ModelSource("gguf", tmp_path / "m.gguf")).given == {}


@pytest.mark.parametrize("content", [{"top_p": 1.5}, {"temperature": "hot"}, {"top_k": True}, {"top_k": 2.5}, [1]])
def test_what_no_request_could_ask_for_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read(tmp_path, content)
