"""SentencePiece tokenizers from GGUF metadata, against transformers and against a plain merging by score."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sentencepiece_gguf import MORE, SCORES, TOKENS, TYPES, sentencepiece_metadata, write_metadata

from pdserve.model_files.text.errors import TokenizerLoadError
from pdserve.model_files.text.gguf_metadata import read_gguf_metadata
from pdserve.model_files.text.gguf_tokenizer import tokenizer_from_gguf
from pdserve.model_files.text.text_tokenizer import FastTokenizer

SIZES = {"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48}
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8}
RATES = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4}
WINDOW = {"rope.dimension_count": 8, "attention.sliding_window": 32}
PIECES = [
    *("the", " quick", " ", "  ", "\n", "\n\n", "hello", "é", "你", "😀", "<s>", "</s>", "<unk>", "<0x0A>", "▁"),
    *("123", " 2024", "x", "\t", " lazy", "the lazy", "<|us", "er|>", *MORE),
]
TEXTS = ["", " ", "  ", "hello world", " hello  world ", "\nüber", "<s>hello</s> lazy", "the lazy▁the▁lazy\n\n\n"]
Change = Callable[[dict[str, Any]], object]


def unchanged(_: dict[str, Any]) -> None:
    """Leave the metadata as they are."""


def put(name: str, value: Any) -> Change:
    return lambda metadata: metadata.update({f"tokenizer.ggml.{name}": value})


def drop(name: str) -> Change:
    return lambda metadata: metadata.pop(f"tokenizer.ggml.{name}")


def one(name: str, index: int, value: Any) -> Change:
    """Return a change of one element of a list."""
    return lambda metadata: metadata[f"tokenizer.ggml.{name}"].__setitem__(index, value)


def write(folder: Path, change: Change = unchanged, architecture: str = "llama") -> Path:
    metadata = sentencepiece_metadata(architecture)
    metadata |= {f"{architecture}.{key}": value for key, value in (SIZES | HEADS | RATES | WINDOW).items()}
    change(metadata)
    return write_metadata(folder / "m.gguf", metadata)


def load(path: Path) -> FastTokenizer:
    return tokenizer_from_gguf(read_gguf_metadata(path))


def load_theirs(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)


def drawn_texts(count: int) -> list[str]:
    """Return texts of pieces, and of tokens of the vocabulary."""
    rng = random.Random(1)
    pieces = [*PIECES, *(token.replace("▁", " ") for token in sentencepiece_metadata()[TOKENS][259:])]
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 8))) for _ in range(count)]


def tie(metadata: dict[str, Any]) -> None:
    """Give all tokens one score."""
    metadata[SCORES] = [0.0] * len(metadata[SCORES])


def shuffle(metadata: dict[str, Any]) -> None:
    """Give learnt tokens scores in another order than that of their ids."""
    learnt = metadata[SCORES][259:]
    random.Random(2).shuffle(learnt)
    metadata[SCORES][259:] = learnt


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("llama", unchanged),
        ("llama", tie),
        ("llama", shuffle),
        ("llama", put("merges", ["h e", "▁ t", "▁t he"])),
        ("llama", put("remove_extra_whitespaces", True)),
        ("llama", put("add_eos_token", True)),
        ("llama", drop("add_bos_token")),
        ("llama", drop("bos_token_id")),
        ("llama", put("eos_token_id", 300)),
        ("llama", put("eos_token_id", sentencepiece_metadata()[TOKENS].index("[INST]"))),
        ("qwen2", unchanged),
        ("phi3", unchanged),
        ("gemma2", unchanged),
        ("gemma3", shuffle),
    ],
)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, architecture: str, change: Change) -> None:
    path = write(tmp_path, change, architecture)
    ours, theirs = load(path), load_theirs(path)
    for text in [*TEXTS, *drawn_texts(60)]:
        for adds in (True, False):
            [ids] = ours.encode_batch([text], add_special_tokens=adds)
            assert ids == theirs.encode(text, add_special_tokens=adds), text
        for skips in (True, False):
            shown = ours.decode(ids, skip_special_tokens=skips)
            assert shown == theirs.decode(ids, skip_special_tokens=skips), text
    named = {name: token for name, token in theirs.special_tokens_map.items() if name != "mask_token"}
    assert ours.special_tokens == named


class ReferenceSentencePiece:
    """Cut at control and user-defined tokens, then merge the pair of the best score again and again."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.ids = {token: i for i, token in enumerate(metadata[TOKENS])}
        self.scores = dict(zip(metadata[TOKENS], metadata[SCORES], strict=True))
        types = metadata[TYPES]
        self.whole = [token for token, i in self.ids.items() if types[i] in (2, 3, 4)]

    def encode(self, text: str, *, prefix: bool) -> list[int]:
        longest_first = sorted(self.whole, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
        found: list[int] = []
        for place, part in enumerate(parts):
            if part in self.whole:
                found.append(self.ids[part])
                continue
            spelled = part.replace(" ", "▁")
            needs_mark = prefix and place == 0 and part and not spelled.startswith("▁")
            found += self.merge(list(f"▁{spelled}" if needs_mark else spelled))
        return found

    def merge(self, parts: Sequence[str]) -> list[int]:
        while True:
            joined = [(self.scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
            known = [pair for pair in joined if pair[0] is not None]
            if not known:
                return [i for part in parts for i in self.ids_of(part)]
            i = -max(known)[1]
            parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]

    def ids_of(self, part: str) -> list[int]:
        return [self.ids[part]] if part in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]


@pytest.fixture(scope="module")
def reference() -> ReferenceSentencePiece:
    return ReferenceSentencePiece(sentencepiece_metadata())


@pytest.fixture(scope="module")
def with_prefix(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load(write(tmp_path_factory.mktemp("prefix")))


@pytest.fixture(scope="module")
def without_prefix(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load(write(tmp_path_factory.mktemp("none"), put("add_space_prefix", False)))


@given(text=st.lists(st.sampled_from([*PIECES, *"abdehloqrtuwÜßäöü:;(), "]), max_size=20).map("".join))
def test_anything_is_encoded_as_the_reference(
    with_prefix: FastTokenizer, without_prefix: FastTokenizer, reference: ReferenceSentencePiece, text: str
) -> None:
    assert with_prefix.encode_batch([text], add_special_tokens=False) == [reference.encode(text, prefix=True)]
    # transformers ignores the key, and llama.cpp obeys it.
    assert without_prefix.encode_batch([text], add_special_tokens=False) == [reference.encode(text, prefix=False)]


def test_a_text_without_a_prefix_keeps_its_first_space(without_prefix: FastTokenizer) -> None:
    [ids] = without_prefix.encode_batch([" hello"], add_special_tokens=False)
    assert without_prefix.decode(ids, skip_special_tokens=True) == " hello"


def test_named_tokens_and_ends(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, put("eot_token_id", 7)))
    assert tokenizer.eos_ids == (2, 7)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.byte_table is not None
    assert tokenizer.byte_table.pieces[3 + 0x0A] == b"\n"


COUNT = len(sentencepiece_metadata()[TOKENS])
BROKEN: dict[str, tuple[Change, str]] = {
    "no scores": (drop("scores"), "metadata 'tokenizer.ggml.scores' should be a list of floats but is missing"),
    "texts for scores": (put("scores", ["1"] * COUNT), "scores' should be a list of floats but is of another type"),
    "fewer scores": (put("scores", [1.0]), f"{COUNT} tokens, but 1 scores; .*--tokenizer-path"),
    "a score that is no number": (one("scores", 300, float("nan")), "the score of token '.*' is not a number; .*path"),
    "fewer types": (put("token_type", [1]), f"{COUNT} tokens, but 1 token types"),
    "a token twice": (one("tokens", 300, "he"), "2 tokens are 'he'; .*--tokenizer-path"),
    "no byte": (one("tokens", 3 + 0x41, "x1"), "no token is the byte <0x41>; .*--tokenizer-path"),
    "a long token": (one("tokens", 300, "x" * 257), "token 'x+….* has 257 characters, and 256 is the most"),
    "bos beyond the tokens": (put("bos_token_id", 9999), "bos_token_id 9999 is outside the vocabulary"),
    "a number for the prefix": (put("add_space_prefix", 1), "add_space_prefix' should be a truth value"),
    "an unknown merge": (put("merges", ["h q"]), "merge 'h q' is of tokens that tokenizer.ggml.tokens lacks"),
    "no merge": (put("merges", ["he"]), "merge 'he' does not name two tokens"),
}
"""Changes by name, and what the refusal says."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, message = BROKEN[name]
    path = write(tmp_path, change)
    with pytest.raises(TokenizerLoadError, match=rf"m\.gguf: .*{message}"):
        load(path).encode_batch(["a"], add_special_tokens=True)
