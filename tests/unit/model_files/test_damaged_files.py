"""Damaged model files are read or refused by name: a sample of ``make reader-campaign``."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from readers import samples
from readers.campaign import run, work_of_all
from readers.cases import READERS, Reader
from readers.worker import fault_of, verdict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from pdserve.model_files.errors import InvalidWeights, UnsupportedModel
from pdserve.model_files.gguf_reader import GGUFFile
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.text.errors import PromptError, TokenizerLoadError
from pdserve.model_files.text.hf_tokenizer import tokenizer_from_folder
from pdserve.model_files.text.template_source import read_json_object

SAMPLED = 100
"""Damaged files of each reader."""


@pytest.mark.timeout(60)
def test_damaged_files_are_read_or_refused_by_name(tmp_path: Path) -> None:
    report = run(work_of_all(SAMPLED), 1, tmp_path)
    assert report.failures == []


def broken_gguf(tmp_path: Path, change: bytes, at: int, *, before: bytes) -> tuple[Reader, bytes, bytes]:
    """Return a reader, its good file, and that file with ``change`` ``at`` bytes behind the text ``before``."""
    reader = READERS["gguf"](tmp_path)
    [good] = reader.good
    start = good.index(before) + len(before) + at
    return reader, good, good[:start] + change + good[start + len(change) :]


DIMENSIONS, KIND, OFFSET = 4, 4 + 2 * 8, 4 + 2 * 8 + 4
"""Places of a matrix' numbers behind its name in a GGUF header."""


@pytest.mark.parametrize(
    ("change", "at", "message"),
    [
        (struct.pack("<Q", 0), OFFSET, "lies at byte 0 of the data"),
        (struct.pack("<Q", 1 << 62), OFFSET, "lies at byte"),
        (struct.pack("<I", 99), KIND, "of type 99, which is unknown"),
        (struct.pack("<Q", 33), DIMENSIONS, "rows of 33 numbers, no multiple of 32|lies at byte"),
        (struct.pack("<Q", 1 << 60), DIMENSIONS + 8, "ends at byte"),
        (struct.pack("<I", 9), 0, "9 dimensions"),
    ],
)
def test_a_gguf_tensor_of_another_place_or_size_is_refused(
    tmp_path: Path, change: bytes, at: int, message: str
) -> None:
    reader, _, broken = broken_gguf(tmp_path, change, at, before=b"blk.0.attn_k.weight")
    reader.file.write_bytes(broken)
    with pytest.raises(InvalidWeights, match=rf"{reader.file} can't be read as GGUF: .*({message})"):
        GGUFFile(reader.file)


def test_a_last_gguf_tensor_that_is_too_small_is_refused(tmp_path: Path) -> None:
    reader, good, broken = broken_gguf(tmp_path, struct.pack("<I", 7), KIND, before=b"output.weight")
    assert verdict(reader, good, broken) is None
    reader.file.write_bytes(good + bytes(31))
    reader.read()
    reader.file.write_bytes(good + bytes(31) + b"x")
    with pytest.raises(InvalidWeights, match=r"the last tensor ends at byte .*, the file at byte"):
        GGUFFile(reader.file)


def test_gguf_numbers_that_are_moved_by_a_byte_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("a", np.ones(9, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(file).tensors["a"].data.tolist() == [1.0] * 9
    whole = file.read_bytes()
    file.write_bytes(whole.rstrip(b"\0"))  # a writer that adds no padding
    assert len(GGUFFile(file).tensors) == 1
    file.write_bytes(whole[:-1])
    with pytest.raises(InvalidWeights, match=r"the last tensor ends at byte .*, the file at byte"):
        GGUFFile(file)


def test_the_judge_of_damaged_files_can_say_no(tmp_path: Path) -> None:
    reader, good, broken = broken_gguf(tmp_path, struct.pack("<Q", 0), OFFSET, before=b"blk.0.attn_k.weight")
    assert "blk.0.attn_k.weight is" in (reader.accepted_damage(good, broken) or "")
    assert "no file is named" in (fault_of("it is broken", tmp_path) or "")
    assert "not one sentence" in (fault_of(f"{tmp_path}\nis broken", tmp_path) or "")
    assert fault_of(f"{tmp_path}/x is broken", tmp_path) is None


@pytest.mark.parametrize("text", [b"[" * 3000, b'{"a":' * 3000, b"{\xff", b"", b"[]", b'{"a": NaN}'])
def test_broken_json_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(text)
    with pytest.raises(TokenizerLoadError, match=rf"^{file} can't be read: .+; correct it, or download it again$"):
        read_json_object(file)


def test_a_config_of_too_many_layers_takes_no_memory(tmp_path: Path) -> None:
    samples.write_json(tmp_path / "config.json", {**samples.CONFIG, "num_hidden_layers": 1 << 40})
    with pytest.raises(UnsupportedModel, match=r"config\.json: num_hidden_layers 1099511627776 .* 10000 at most"):
        read_spec(ModelSource("hf", tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("hidden_size", 32.5, "32.5 can't be used: it is no whole number"),
        ("num_hidden_layers", True, "True can't be used: it is no whole number"),
        ("vocab_size", [1], r"\[1\] can't be used: int\(\) argument must be"),
        ("rms_norm_eps", "x", "'x' can't be used: it must be a number"),
        ("tie_word_embeddings", "false", "'false' can't be used: it must be true or false"),
        ("rope_scaling", 5, "5 can't be used: "),
        ("intermediate_size", "y" * 1000, "'y{199}… can't be used: "),
    ],
)
def test_a_value_that_can_not_be_used_is_named_with_its_key(
    tmp_path: Path, key: str, value: object, reason: str
) -> None:
    samples.write_json(tmp_path / "config.json", {**samples.CONFIG, key: value})
    with pytest.raises(
        UnsupportedModel, match=rf"config\.json: {key} {reason}.*; correct it, or download the file again$"
    ):
        read_spec(ModelSource("hf", tmp_path))


def words(**vocabulary: int) -> Tokenizer:
    return Tokenizer(WordLevel(vocabulary, unk_token="unknown"))


def test_a_text_that_can_not_be_encoded_is_the_clients_error(tmp_path: Path) -> None:
    words(a=0).save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.encode_batch(["a"], add_special_tokens=True) == [[0]]
    for texts in (["b"], ["a", "b"]):
        with pytest.raises(PromptError, match=r"can't encode this text: .*Missing"):
            tokenizer.encode_batch(texts, add_special_tokens=True)


def test_a_tokenizer_without_the_token_that_it_puts_before_texts_is_refused(tmp_path: Path) -> None:
    tokenizer = words(a=0, b=1)
    tokenizer.post_processor = TemplateProcessing(single=["b", "$A"], special_tokens=[("b", 1)])
    text = tokenizer.to_str().replace('"b": {', '"c": {').replace('"b":{', '"c":{')
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerLoadError, match=rf"{tmp_path / 'tokenizer.json'} can't be read: "):
        tokenizer_from_folder(tmp_path)


def test_an_id_beyond_any_vocabulary_is_refused(tmp_path: Path) -> None:
    text = words(a=0, b=1).to_str().replace('"b":1', '"b":4294967295')
    (tmp_path / "tokenizer.json").write_text(text)
    tokenizer = tokenizer_from_folder(tmp_path)
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json: token 'b' has the id 4294967295"):
        assert tokenizer.byte_table is None
