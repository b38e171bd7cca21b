"""Tokenizers from Hugging Face folders."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.load import load_tokenizer
from pdserve.server.options import ServerOptions


def make_backend():
    """Make a tokenizer of all bytes, <s> (256), </s> (257) and <|end|> (258). Plain texts begin with <s>."""
    backend = Tokenizer(BPE({t: i for i, t in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<|end|>")])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 256)])
    return backend


def make_folder(path, **files):
    """Write a folder with a tokenizer and ``files``: name without .json → content."""
    make_backend().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def load(folder, **options):
    return load_tokenizer(ServerOptions(tokenizer_path=str(folder), **options))


def test_plain_texts_get_what_the_tokenizer_adds_and_chats_do_not(tmp_path):
    tokenizer = load(make_folder(tmp_path))
    [plain] = tokenizer.encode_batch(["a"], add_special_tokens=True)
    [bare] = tokenizer.encode_batch(["a"], add_special_tokens=False)
    assert plain == [256, *bare]


def test_truncation_that_a_training_left_behind_does_not_cut_prompts(tmp_path):
    backend = make_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert [len(ids) for ids in tokenizer.encode_batch(["a" * 9, "b"], add_special_tokens=False)] == [9, 1]


def test_end_of_text_comes_from_every_file_that_names_it(tmp_path):
    make_folder(
        tmp_path,
        generation_config={"eos_token_id": [258, 257]},
        config={"eos_token_id": 257},
        tokenizer_config={"eos_token": {"content": "<s>"}},
    )
    assert load(tmp_path).eos_ids == (258, 257, 256)


def test_named_tokens_come_from_strings_and_objects(tmp_path):
    make_folder(tmp_path, tokenizer_config={"bos_token": "<s>"}, special_tokens_map={"eos_token": {"content": "</s>"}})
    assert load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_tokens_that_only_the_config_names_are_added_where_their_id_fits(tmp_path):
    added = {"259": {"content": "<think>", "special": True}, "300": {"content": "<far>", "special": False}}
    tokenizer = load(make_folder(tmp_path, tokenizer_config={"added_tokens_decoder": added}))
    assert tokenizer.backend.token_to_id("<think>") == 259
    assert tokenizer.backend.token_to_id("<far>") is None
    assert tokenizer.byte_table.special_ids == frozenset({256, 257, 258, 259})


def test_the_chat_template_of_the_folder_comes_along(tmp_path):
    tokenizer = load(make_folder(tmp_path, tokenizer_config={"chat_template": "{{ 1 }}"}))
    assert tokenizer.chat_template.default == "{{ 1 }}"


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config"])
def test_a_damaged_file_is_named(tmp_path, name):
    make_folder(tmp_path)
    (tmp_path / f"{name}.json").write_text("{")
    with pytest.raises(TokenizerLoadError, match=f"{name}.json"):
        load(tmp_path)
