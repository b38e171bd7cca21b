"""Builds a tokenizer from the metadata of a GGUF file (``tokenizer.ggml.*``), for byte-level BPE vocabularies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ..errors import shortened
from .byte_table import byte_level_alphabet, byte_level_table
from .errors import TokenizerLoadError
from .gguf_metadata import GGUFMetadata
from .template_source import templates_in_gguf
from .text_tokenizer import FastTokenizer


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


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
ELSEWHERE = "give the model's Hugging Face folder as --tokenizer-path"
"""Advice for a file with a tokenizer that can't be used."""
# A chat model may end its turn with another token than a text; a GGUF file names each apart.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_from_gguf(metadata: GGUFMetadata) -> FastTokenizer:
    """Make the file's tokenizer; raises ``TokenizerLoadError``, which names the supported kinds, for others."""
    splitting = _find_splitting(metadata)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise TokenizerLoadError(f"{metadata.path}: {len(tokens)} tokens, but {len(types)} token types")
    _check_tokens(metadata, tokens)
    special_ids = frozenset(i for i, t in enumerate(types) if t in SPECIAL_TYPES)
    found = {key: _token_id(metadata, key, len(tokens)) for key in EOS_KEYS}
    eos_ids = tuple(dict.fromkeys(token_id for token_id in found.values() if token_id is not None))
    named = {name: _token_id(metadata, f"{key}_token_id", len(tokens)) for name, key in NAMED_TOKENS.items()}
    return FastTokenizer(
        make_backend=partial(_build_backend, metadata, splitting, tokens, types),
        make_byte_table=partial(byte_level_table, tokens, special_ids),
        eos_ids=eos_ids,
        special_tokens={name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
        chat_template=templates_in_gguf(metadata),
    )


def _find_splitting(metadata: GGUFMetadata) -> Splitting:
    model = metadata.string("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerLoadError(
            f"{metadata.path} has a tokenizer of kind {shortened(repr(model))}; from GGUF only 'gpt2' (byte-level BPE) "
            "is supported. Give the model's Hugging Face folder as --tokenizer-path"
        )
    pre = metadata.string("tokenizer.ggml.pre")
    if pre not in SPLITTINGS:
        raise TokenizerLoadError(
            f"{metadata.path} has the pre-tokenizer {shortened(repr(pre))}; from GGUF these are supported: "
            f"{', '.join(SPLITTINGS)}. Give the model's Hugging Face folder as --tokenizer-path"
        )
    return SPLITTINGS[pre]


def _token_id(metadata: GGUFMetadata, key: str, vocab_size: int) -> int | None:
    token_id = metadata.integer(f"tokenizer.ggml.{key}")
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise TokenizerLoadError(f"{metadata.path}: {key} {token_id} is outside the vocabulary of {vocab_size} tokens")
    return token_id


def _build_backend(metadata: GGUFMetadata, splitting: Splitting, tokens: list[str], types: list[int]) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_split_merge(metadata, merge) for merge in metadata.strings("tokenizer.ggml.merges")]
    for pair in merges:
        if not {*pair, "".join(pair)} <= vocab.keys():
            raise TokenizerLoadError(
                f"{metadata.path}: merge {shortened(repr(' '.join(pair)))} is of tokens that tokenizer.ggml.tokens "
                f"lacks; {ELSEWHERE}"
            )
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=splitting.ignore_merges))
    backend.pre_tokenizer = _pre_tokenizer(splitting)
    backend.decoder = decoders.ByteLevel()
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    for token, kind in zip(tokens, types, strict=True):
        if kind in SPECIAL_TYPES:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    _surround(backend, metadata, splitting, tokens)
    return backend


def _check_tokens(metadata: GGUFMetadata, tokens: Sequence[str]) -> None:
    """Raise ``TokenizerLoadError`` if plain text could lose characters, or several ids have the same token."""
    known, alphabet = set(tokens), byte_level_alphabet()
    for byte in PLAIN_BYTES:
        if alphabet[byte] not in known:
            raise TokenizerLoadError(f"{metadata.path}: no token is the byte 0x{byte:02x} alone; {ELSEWHERE}")
    if len(known) < len(tokens):
        token, count = Counter(tokens).most_common(1)[0]
        raise TokenizerLoadError(f"{metadata.path}: {count} tokens are {shortened(repr(token))}; {ELSEWHERE}")


def _split_merge(metadata: GGUFMetadata, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise TokenizerLoadError(f"{metadata.path}: merge {shortened(repr(merge))} does not name two tokens")
    return left, right


def _pre_tokenizer(splitting: Splitting) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.regex is None))
    return pre_tokenizers.Sequence(steps)


def _surround(backend: Tokenizer, metadata: GGUFMetadata, splitting: Splitting, tokens: list[str]) -> None:
    """Make ``backend`` put BOS and EOS around plain texts, as far as the file asks for them."""
    ids = {name: _token_id(metadata, f"{name}_token_id", len(tokens)) for name in ("bos", "eos")}
    wanted = {
        "bos": metadata.boolean("tokenizer.ggml.add_bos_token", splitting.add_bos),
        "eos": metadata.boolean("tokenizer.ggml.add_eos_token", False),
    }
    around = {name: token_id for name, token_id in ids.items() if wanted[name] and token_id is not None}
    if not around:
        return
    single = [tokens[around[name]] if name in around else None for name in ("bos", "eos")]
    backend.post_processor = processors.TemplateProcessing(
        single=[part for part in (single[0], "$A", single[1]) if part is not None],
        special_tokens=[(tokens[token_id], token_id) for token_id in set(around.values())],
    )
