"""Folders without a tokenizer.json, loaded by transformers."""

import json

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from pdserve.detokenizer.request_decoder import ByteDecoders, WindowDecoders, make_decoder_factory
from pdserve.messages.base import unpack_i32
from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.load import load_tokenizer
from pdserve.server.options import ServerOptions

TEXT = "Hé 😀!"


def stream(tokenizer, token_ids):
    decoder = make_decoder_factory(tokenizer).start(unpack_i32(b""), skip_special_tokens=True)
    return "".join(decoder.decode([token_id]) for token_id in token_ids)


def test_vocabulary_and_merges_become_a_fast_tokenizer(tmp_path):
    vocab = {token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": "{{ 1 }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(ServerOptions(tokenizer_path=str(tmp_path)))
    [token_ids] = tokenizer.encode_batch([TEXT], add_special_tokens=True)
    assert isinstance(make_decoder_factory(tokenizer), ByteDecoders)
    assert stream(tokenizer, [*token_ids, 256]) == TEXT
    assert tokenizer.eos_ids == (256,)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.default == "{{ 1 }}"


def test_a_tokenizer_in_python_is_decoded_through_a_window(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    tokenizer = load_tokenizer(ServerOptions(tokenizer_path=str(tmp_path)))
    [token_ids] = tokenizer.encode_batch([TEXT], add_special_tokens=False)
    assert isinstance(make_decoder_factory(tokenizer), WindowDecoders)
    assert stream(tokenizer, token_ids) == TEXT


@pytest.mark.parametrize(
    ("tokenizer_class", "files", "named"),
    [
        ("GPT2Tokenizer", {"vocab.json": "[1]", "merges.txt": "#version: 0.2\n"}, "of vocab.json and merges.txt and"),
        ("GPT2Tokenizer", {"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2\nb c\n"}, "of vocab.json and mer"),
        (5, {}, "of tokenizer_config.json"),
        ("NoSuchTokenizer", {}, "of tokenizer_config.json"),
    ],
)
def test_broken_files_are_named_on_one_line(tmp_path, tokenizer_class, files, named):
    config = {"tokenizer_class": tokenizer_class}
    for name, text in {"tokenizer_config.json": json.dumps(config), **files}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerLoadError, match=f"{tmp_path} has no tokenizer.json.* {named}") as refused:
        load_tokenizer(ServerOptions(tokenizer_path=str(tmp_path)))
    assert "\n" not in str(refused.value)
