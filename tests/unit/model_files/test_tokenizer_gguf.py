"""The tokenizer built from GGUF metadata, against a byte-pair encoding written down plainly."""

import re
from itertools import pairwise

import gguf
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from pdserve.model_files.model_limits import ModelLimits, read_limits
from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.text.byte_table import byte_level_alphabet
from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.gguf_metadata import read_gguf_metadata
from pdserve.model_files.text.gguf_tokenizer import tokenizer_from_gguf
from pdserve.model_files.text.load import load_tokenizer
from pdserve.server.options import ServerOptions

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SAMPLES = [
    "Hello, world! don't THEY'RE we'll",
    "def f(x):\n\treturn [y**2 for y in x]  # 12345\n\n\n",
    "你好，世界！日本語のテスト 한국어 Привет мир",
    "👩‍👩‍👧‍👦 🇩🇪 é à",
    "3.14159 ٣٤٥ ⅷ ½ ² 1st",
    "   leading, trailing   ",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "\u00a0\u2003\r\n x",
]


class ReferenceBPE:
    """Cut at digits, then into words, then merge the pair of lowest rank again and again."""

    def __init__(self, metadata):
        self.ids = {t: i for i, t in enumerate(metadata.strings("tokenizer.ggml.tokens"))}
        merges = metadata.strings("tokenizer.ggml.merges")
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
        types = metadata.integers("tokenizer.ggml.token_type")
        self.special = [t for t, i in self.ids.items() if types[i] == 3]
        self.alphabet = byte_level_alphabet()

    def encode(self, text):
        parts = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        return [i for part in parts for i in ([self.ids[part]] if part in self.special else self.encode_plain(part))]

    def encode_plain(self, text):
        cut = [p for p in regex.split(r"(\p{N})", text) if p]
        words = [w for p in cut for w in regex.findall(GPT2_WORDS, p)]
        return [self.ids[t] for word in words for t in self.merge([self.alphabet[b] for b in word.encode()])]

    def merge(self, parts):
        while True:
            pairs = [(self.ranks[p], i) for i, p in enumerate(pairwise(parts)) if p in self.ranks]
            if not pairs:
                return parts
            _, i = min(pairs)
            parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


@pytest.fixture(scope="module")
def smollm():
    return load_tokenizer(ServerOptions())


@pytest.fixture(scope="module")
def reference():
    return ReferenceBPE(read_gguf_metadata(resolve_model("smollm2").path))


@pytest.mark.parametrize("text", SAMPLES)
def test_smollm_encodes_as_the_reference(smollm, reference, text):
    [token_ids] = smollm.encode_batch([text], add_special_tokens=True)
    assert token_ids == reference.encode(text)
    assert smollm.decode(token_ids, skip_special_tokens=False) == text


@given(st.text(alphabet="ab Zst're0129½²٣\n\t\r.,!-_你é\u0301😀\u200dßж", max_size=40))
def test_smollm_encodes_anything_as_the_reference(smollm, reference, text):
    assert smollm.encode_batch([text], add_special_tokens=True) == [reference.encode(text)]


def test_a_batch_is_encoded_as_its_texts_alone(smollm):
    alone = [smollm.encode_batch([text], add_special_tokens=True)[0] for text in SAMPLES]
    assert smollm.encode_batch(SAMPLES, add_special_tokens=True) == alone


def test_smollm_facts(smollm):
    assert smollm.eos_ids == (2,)
    assert smollm.special_tokens["bos_token"] == "<|im_start|>"
    assert smollm.byte_table.special_ids == frozenset(range(17))
    assert smollm.max_token_bytes == 81
    assert read_limits(resolve_model("smollm2"), None) == ModelLimits(8192, 49152)
    assert read_limits(resolve_model("smollm2"), 100).context_length == 100


def write_gguf(path, *, model="gpt2", pre="gpt-2", merges=("a b",), types=None, **integers):
    """Write a small vocabulary: all bytes, "ab", two control tokens and one user-defined."""
    tokens = [*byte_level_alphabet().values(), "ab", "<bos>", "<eos>", "<tool>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_array("general.languages", ["en", "de"])
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * 257 + [3, 3, 4])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    for key, value in integers.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value) if isinstance(value, bool) else writer.add_uint32(
            f"tokenizer.ggml.{key}", value
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(path):
    return tokenizer_from_gguf(read_gguf_metadata(path))


def test_metadata_is_what_the_gguf_package_wrote(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", add_bos_token=True)
    fields = gguf.GGUFReader(path).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert read_gguf_metadata(path).values == expected


@pytest.mark.parametrize("keep", [0, 3, 30, 700])
def test_a_damaged_file_is_refused(tmp_path, keep):
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TokenizerLoadError, match="GGUF"):
        read_gguf_metadata(path)


def encode(path, text, *, add_special_tokens=True):
    tokenizer = load(path)
    [token_ids] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    return [tokenizer.backend.id_to_token(i) for i in token_ids]


def test_bos_and_eos_are_added_as_the_file_says(tmp_path):
    assert encode(write_gguf(tmp_path / "none.gguf"), "ab") == ["ab"]
    both = write_gguf(tmp_path / "both.gguf", add_bos_token=True, add_eos_token=True)
    assert encode(both, "ab") == ["<bos>", "ab", "<eos>"]
    assert encode(both, "ab", add_special_tokens=False) == ["ab"]
    assert encode(write_gguf(tmp_path / "llama3.gguf", pre="llama-bpe"), "ab") == ["<bos>", "ab"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab 123's\n\nx", ["ab", "Ġ", "1", "2", "3"]),
        ("qwen2", "AB'S x", ["A", "B", "'", "S", "Ġ", "x"]),
    ],
)
def test_other_splittings_encode(tmp_path, pre, text, words):
    assert encode(write_gguf(tmp_path / "m.gguf", pre=pre), text)[: len(words)] == words


@pytest.mark.parametrize(("pre", "merged"), [("gpt-2", True), ("llama-bpe", True), ("smollm", False), ("qwen2", False)])
def test_digits_are_merged_only_where_the_family_does(tmp_path, pre, merged):
    types = [1] * 257 + [3, 3, 4]
    path = write_gguf(tmp_path / "m.gguf", pre=pre, types=types, merges=["a b"])
    metadata = read_gguf_metadata(path)
    # "ab" becomes "12" and its merge "1 2".
    metadata.strings("tokenizer.ggml.tokens")[256] = "12"
    metadata.values["tokenizer.ggml.merges"] = ["1 2"]
    tokenizer = tokenizer_from_gguf(metadata)
    [token_ids] = tokenizer.encode_batch(["12"], add_special_tokens=False)
    assert (token_ids == [256]) is merged


def test_user_defined_tokens_are_found_but_are_not_special(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    assert encode(path, "a<tool><eos>") == ["a", "<tool>", "<eos>"]
    assert load(path).decode([259, 258], skip_special_tokens=True) == "<tool>"


def test_every_end_of_turn_token_ends_the_output(tmp_path):
    assert load(write_gguf(tmp_path / "m.gguf", eot_token_id=259)).eos_ids == (258, 259)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama"}, "--tokenizer-path"),
        ({"pre": "nobody-knows"}, "smollm, .*qwen2, .*llama-bpe"),
        ({"types": [1]}, "token types"),
        ({"eot_token_id": 999}, "outside the vocabulary"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_do(tmp_path, fields, message):
    with pytest.raises(TokenizerLoadError, match=message):
        load(write_gguf(tmp_path / "m.gguf", **fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["tokenizer.ggml.tokens"].__setitem__(256, "a"), "2 tokens are 'a'"),
        (lambda v: v["tokenizer.ggml.tokens"].__setitem__(97 - 33, "aa"), "no token is the byte 0x61 alone"),
        (lambda v: v["tokenizer.ggml.merges"].append("a q"), "merge 'a q' is of tokens that .* lacks"),
        (lambda v: v["tokenizer.ggml.merges"].append("ab"), "merge 'ab' does not name two tokens"),
        (lambda v: v.update({"tokenizer.ggml.bos_token_id": -1}), "bos_token_id -1 is outside the vocabulary"),
    ],
)
def test_a_broken_table_of_tokens_is_refused(tmp_path, change, message):
    metadata = read_gguf_metadata(write_gguf(tmp_path / "m.gguf"))
    change(metadata.values)
    with pytest.raises(TokenizerLoadError, match=rf"m\.gguf: {message}"):
        tokenizer_from_gguf(metadata).encode_batch(["a"], add_special_tokens=True)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", spice_a=1, spice_b=2)
    path.write_bytes(path.read_bytes().replace(b"ggml.spice_b", b"ggml.spice_a"))
    with pytest.raises(TokenizerLoadError, match=r"m\.gguf can't be read as GGUF: it has the key '.*spice_a' twice"):
        read_gguf_metadata(path)
