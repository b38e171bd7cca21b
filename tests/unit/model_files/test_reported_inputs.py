"""Minimal inputs of bug reports about other servers, with the values that transformers or the file's format gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints.answers import load_reference
from checkpoints.gguf_parts import make_parts
from support.families import make_reference
from support.model_harness import Harness, close, draw, reference_logits
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.sampling_defaults import read_sampling_defaults
from pdserve.model_files.text.chat_template import ChatTemplates
from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.gguf_metadata import read_gguf_metadata
from pdserve.model_files.text.gguf_tokenizer import tokenizer_from_gguf
from pdserve.model_files.text.hf_tokenizer import tokenizer_from_folder
from pdserve.model_files.text.text_tokenizer import TextTokenizer

BOS, EOS, MORE = 256, 257, 258
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"


def load(folder: Path, **config: Any) -> TextTokenizer:
    """Load a tokenizer with <s> (256), </s> (257) and <x> (258) in its vocabulary.

    The added tokens of its tokenizer.json do not list them. ``config``: the content of tokenizer_config.json, beside a
    template.
    """
    tokens = [*sorted(ByteLevel.alphabet()), "<s>", "</s>", "<x>"]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, **config}))
    return tokenizer_from_folder(folder)


def encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def prompt(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Return the tokens of the prompt that the folder's template makes of one message."""
    assert tokenizer.chat_template is not None
    templates = ChatTemplates(tokenizer.chat_template, tokenizer.special_tokens)
    return encode(tokenizer, templates.render(Conversation([ChatMessage("user", text)])))


@pytest.mark.parametrize("names", ["extra_special_tokens", "additional_special_tokens"])
def test_tokens_that_only_the_config_names_are_whole_in_texts_and_left_out_of_answers(
    tmp_path: Path, names: str
) -> None:
    h, i = encode(load(tmp_path), "hi")
    assert len(encode(load(tmp_path), "<s>")) == 3
    tokenizer = load(tmp_path, bos_token="<s>", eos_token="</s>", **{names: ["<x>"]})
    assert encode(tokenizer, "<s>hi</s>") == prompt(tokenizer, "hi") == [BOS, h, i, EOS]
    assert encode(tokenizer, "h<x>i") == [h, MORE, i]
    assert tokenizer.decode([BOS, MORE, i, EOS], skip_special_tokens=True) == "i"
    assert tokenizer.eos_ids == (EOS,)


def test_the_older_map_does_not_change_the_end_of_text_of_a_template(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<x>"}))
    added = {str(token_id): {"content": text, "special": True} for token_id, text in ((EOS, "</s>"), (MORE, "<x>"))}
    tokenizer = load(tmp_path, bos_token="", eos_token="</s>", added_tokens_decoder=added)
    assert prompt(tokenizer, "hi") == [*encode(tokenizer, "hi"), EOS]
    assert tokenizer.eos_ids == (EOS,)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_yarn_added_to_a_config_with_rope_parameters_counts_as_in_transformers(tmp_path: Path, family: str) -> None:
    make_reference(family, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}).save_pretrained(tmp_path)
    plain, tokens = load_reference(tmp_path), draw(150, 3)
    config = json.loads((tmp_path / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": yarn}))
    logits = Harness(tmp_path, attention_backend="torch").forward((0, tokens))
    close(logits, reference_logits(load_reference(tmp_path), tokens))
    assert (logits - reference_logits(plain, tokens)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pre", None, r"m\.gguf has the pre-tokenizer None; .*smollm, .*--tokenizer-path"),
        ("pre", "default", r"m\.gguf has the pre-tokenizer 'default'; .*smollm, .*--tokenizer-path"),
        ("token_type", None, r"m\.gguf: metadata 'tokenizer\.ggml\.token_type' should be .* but is missing"),
    ],
)
def test_a_gguf_that_does_not_say_how_to_split_texts_is_refused_by_name(
    tmp_path: Path, key: str, value: str | None, message: str
) -> None:
    parts = make_parts("llama").copy()
    parts.metadata.pop(f"tokenizer.ggml.{key}")
    parts.metadata |= {} if value is None else {f"tokenizer.ggml.{key}": value}
    parts.write(tmp_path / "m.gguf")
    with pytest.raises(TokenizerLoadError, match=message):
        tokenizer_from_gguf(read_gguf_metadata(tmp_path / "m.gguf"))


def test_do_sample_does_not_change_the_sampling_defaults(tmp_path: Path) -> None:
    for do_sample in (False, True):
        (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": do_sample, "temperature": 0.7}))
        assert read_sampling_defaults(ModelSource("hf", tmp_path)).given == {"temperature": 0.7}
