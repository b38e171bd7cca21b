"""The script that an engine follows instead of a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.options import ModelOptions
from pdserve.model_files.text.load import load_tokenizer
from pdserve.model_runner.engines.scripted import Script, ScriptEntry, read_script


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelOptions(model_path="smollm2"))


def answer(tokenizer, prompt: str, *entries: ScriptEntry) -> str:
    """Return the output for ``prompt``, up to the first EOS."""
    script = Script(list(entries), tokenizer)
    (ids,) = tokenizer.encode_batch([prompt], add_special_tokens=False)
    prompt_ids, output = np.array(ids, np.int32), []
    while (token := script.token(prompt_ids, len(output))) not in tokenizer.eos_ids:
        output.append(token)
    return tokenizer.decode(output, skip_special_tokens=False)


def test_the_entry_that_ends_last_in_the_prompt_is_chosen(tokenizer):
    entries = ScriptEntry("1", "one"), ScriptEntry("2", "two"), ScriptEntry("other")
    assert answer(tokenizer, "first one, then two", *entries) == "2"
    assert answer(tokenizer, "first two, then one", *entries) == "1"
    assert answer(tokenizer, "neither", *entries) == "other"
    assert answer(tokenizer, "neither", *entries[:2]) == ""


def test_of_entries_that_end_together_the_first_is_chosen(tokenizer):
    assert answer(tokenizer, "hello world", ScriptEntry("a", "world"), ScriptEntry("b", "hello world")) == "a"


def test_special_tokens_of_an_output_are_one_token_each(tokenizer):
    script = Script([ScriptEntry("<|im_start|>x")], tokenizer)
    assert tokenizer.decode([script.token(np.array([5], np.int32), 0)], skip_special_tokens=False) == "<|im_start|>"


@pytest.mark.parametrize("text", ["", "{}", '[{"contains": "a"}]', '[{"output": "a", "containz": "b"}]', "[1]"])
def test_an_unusable_script_is_refused_by_its_name(text: str, tmp_path: Path):
    (tmp_path / "script.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"script\.json is not usable"):
        read_script(tmp_path)


def test_a_missing_script_is_refused_by_its_name(tmp_path: Path):
    with pytest.raises(UnsupportedModel, match=r"script\.json is not usable"):
        read_script(tmp_path)


def test_a_script_is_read(tmp_path: Path):
    (tmp_path / "script.json").write_text(json.dumps([{"contains": "a", "output": "b"}, {"output": "c"}]))
    assert read_script(tmp_path) == [ScriptEntry("b", "a"), ScriptEntry("c")]
