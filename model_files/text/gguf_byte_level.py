"""Byte-level BPE from a GGUF file: ``tokenizer.ggml.model`` "gpt2"."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ..errors import shortened
from .byte_table import byte_level_alphabet, byte_level_table
from .errors import TokenizerLoadError
from .gguf_vocabulary import ELSEWHERE, GGUFVocabulary
from .template_source import templates_in_gguf
from .text_tokenizer import FastTokenizer


class Splitting(NamedTuple):
    """How a model family cuts text into the words that merges stay within.

    ``regex`` None is GPT-2's own pattern, which the library has built in. ``ignore_merges``: a word that is a token
    is taken whole. ``nfc``: the family's own tokenizer composes characters first.
    """

    regex: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"

# Names are those of ``tokenizer.ggml.pre``.
SPLITTINGS = {
    "gpt-2": Splitting(),
    "smollm": Splitting(single_digits=True),
    "starcoder": Splitting(single_digits=True),
    "refact": Splitting(single_digits=True),
    "qwen2": Splitting(regex=_QWEN2, nfc=True),
    "deepseek-r1-qwen": Splitting(regex=_QWEN2, nfc=True),
    "llama-bpe": Splitting(regex=_LLAMA3, ignore_merges=True, add_bos=True),
    "llama3": Splitting(regex=_LLAMA3, ignore_merges=True, add_bos=True),
}
PLAIN_BYTES = (0x0A, *range(0x20, 0x7F))
"""Bytes that every text may have. Published vocabularies lack some control characters, and rare lead bytes."""


def byte_level_tokenizer(vocabulary: GGUFVocabulary) -> FastTokenizer:
    """Make the byte-level BPE tokenizer of ``vocabulary``.

    Raises ``TokenizerLoadError`` for a broken table or an unsupported pre-tokenizer; then it names the supported ones.
    """
    splitting = _find_splitting(vocabulary)
    _check_bytes(vocabulary)
    vocabulary.check_distinct()
    return FastTokenizer(
        make_backend=partial(_build_backend, vocabulary, splitting),
        make_byte_table=partial(byte_level_table, vocabulary.tokens, vocabulary.special_ids),
        eos_ids=vocabulary.eos_ids,
        special_tokens={name: vocabulary.tokens[token_id] for name, token_id in vocabulary.named_ids.items()},
        chat_template=templates_in_gguf(vocabulary.metadata),
    )


def _find_splitting(vocabulary: GGUFVocabulary) -> Splitting:
    pre = vocabulary.metadata.string("tokenizer.ggml.pre")
    if pre not in SPLITTINGS:
        raise TokenizerLoadError(
            f"{vocabulary.metadata.path} has the pre-tokenizer {shortened(repr(pre))}; from GGUF these are supported: "
            f"{', '.join(SPLITTINGS)}. Give the model's Hugging Face folder as --tokenizer-path"
        )
    return SPLITTINGS[pre]


def _check_bytes(vocabulary: GGUFVocabulary) -> None:
    """Raise ``TokenizerLoadError`` if a byte of ``PLAIN_BYTES`` has no token: encoding a text would lose it."""
    known, alphabet = set(vocabulary.tokens), byte_level_alphabet()
    for byte in PLAIN_BYTES:
        if alphabet[byte] not in known:
            raise TokenizerLoadError(
                f"{vocabulary.metadata.path}: no token is the byte 0x{byte:02x} alone; {ELSEWHERE}"
            )


def _build_backend(vocabulary: GGUFVocabulary, splitting: Splitting) -> Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(BPE(ids, vocabulary.merges(), ignore_merges=splitting.ignore_merges))
    backend.pre_tokenizer = _pre_tokenizer(splitting)
    backend.decoder = decoders.ByteLevel()
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    vocabulary.add_to(backend, vocabulary.special_ids)
    vocabulary.surround(backend, add_bos=splitting.add_bos)
    return backend


def _pre_tokenizer(splitting: Splitting) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.regex is None))
    return pre_tokenizers.Sequence(steps)
