"""Tiny tokenizers of every kind that the ``tokenizers`` library builds, and token sequences for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from pdserve.model_files.text.byte_table import byte_level_alphabet
from pdserve.model_files.text.gguf_metadata import read_gguf_metadata
from pdserve.model_files.text.gguf_tokenizer import tokenizer_from_gguf
from pdserve.model_files.text.hf_tokenizer import tokenizer_from_folder
from pdserve.model_files.text.text_tokenizer import TextTokenizer

from .sentencepiece_gguf import write_metadata

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WORDS = [
    *("▁five", "▁dog", "dog", "▁", "▁▁", "a▁b", "s", "é", "你", REPLACEMENT, "  two", " end ", "x"),
    *("##s", "##.", "~~s", "you</w>", "s</w>", "</w>", "<pad>", "|", "||", "<0xyz>", "<0x٣٣>"),
    *(".", ",", "'", " ", " ' ", "n't", " n", "'m", "'", "do", "▁do", "not", " do not", "'re", "▁'s", "n", "▁.", "r"),
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_PIECES = [b"\xf0\x9f", b"\x98\x80", b"\xe4\xbd", b"\xbd\xa0\xe5", b" the", b"\xcc\x81", b"e\xcc", b" .", b" n't"]
SPECIALS = ["<s>", "</s>", "<x0>", "<x1>", "<x2>"]
ADDED = [
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("Normal É", normalized=True),
    AddedToken(" in spaces ", lstrip=True, rstrip=True, normalized=False),
]


class Kind(NamedTuple):
    """``make``: the library's tokenizer, without added tokens. ``cleans_up``: what tokenizer_config.json says."""

    make: Callable[[], Tokenizer]
    cleans_up: bool = False


class TokenizerPair(NamedTuple):
    """A tokenizer of pdserve, and the decoder that it has to agree with."""

    ours: TextTokenizer
    theirs: Callable[[Sequence[int], bool], str]
    """Whole text of token ids, with or without ``skip_special_tokens``."""
    tokens: dict[int, str]
    specials: frozenset[int]


def _bpe(words: Sequence[str], decoder: decoders.Decoder | None, *, byte_fallback: bool = False) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return _with_decoder(Tokenizer(models.BPE(vocab, [], byte_fallback=byte_fallback)), decoder)


def _unigram(words: Sequence[str], decoder: decoders.Decoder | None, *, byte_fallback: bool = False) -> Tokenizer:
    vocab = [(word, -1.0) for word in dict.fromkeys(words)]
    return _with_decoder(Tokenizer(models.Unigram(vocab, 0, byte_fallback)), decoder)


def _words(model: Any, decoder: decoders.Decoder | None) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(dict.fromkeys(["[UNK]", *WORDS]))}
    return _with_decoder(Tokenizer(model(vocab, unk_token="[UNK]")), decoder)


def _byte_level(**options: bool) -> Tokenizer:
    alphabet = byte_level_alphabet()
    pieces = ["".join(alphabet[byte] for byte in piece) for piece in BYTE_PIECES]
    tokenizer = _bpe([*alphabet.values(), *pieces], decoders.ByteLevel(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    return tokenizer


def _with_decoder(tokenizer: Tokenizer, decoder: decoders.Decoder | None) -> Tokenizer:
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def _sentencepiece(*more: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def _metaspace(**options: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = _unigram(WORDS, decoders.Metaspace(**options))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**options)
        return tokenizer

    return make


KINDS: dict[str, Kind] = {
    "bpe without a decoder": Kind(lambda: _bpe(WORDS, None)),
    "bpe with suffixes": Kind(lambda: _bpe(WORDS, decoders.BPEDecoder()), cleans_up=True),
    "bpe with byte fallback, first space stripped": Kind(
        lambda: _bpe([*WORDS, *BYTES], _sentencepiece(decoders.Strip(" ", 1, 0)), byte_fallback=True)
    ),
    "bpe with byte fallback": Kind(lambda: _bpe([*WORDS, *BYTES], _sentencepiece(), byte_fallback=True)),
    "byte-level": Kind(lambda: _byte_level(add_prefix_space=False)),
    "byte-level with a prefix space": Kind(
        lambda: _byte_level(add_prefix_space=True, trim_offsets=True), cleans_up=True
    ),
    "byte-level without trimmed offsets": Kind(lambda: _byte_level(add_prefix_space=False, trim_offsets=False)),
    "unigram, metaspace always": Kind(_metaspace(prepend_scheme="always")),
    "unigram, metaspace first": Kind(_metaspace(prepend_scheme="first"), cleans_up=True),
    "unigram, metaspace never": Kind(_metaspace(prepend_scheme="never")),
    "unigram, metaspace not split": Kind(_metaspace(prepend_scheme="always", split=False)),
    "unigram with byte fallback": Kind(
        lambda: _unigram([*WORDS, *BYTES], _sentencepiece(decoders.Strip(" ", 1, 0)), byte_fallback=True)
    ),
    "unigram with byte fallback, cleaned up": Kind(
        lambda: _unigram([*WORDS, *BYTES], _sentencepiece(), byte_fallback=True), cleans_up=True
    ),
    "unigram, bytes before metaspace": Kind(
        lambda: _unigram(
            [*WORDS, *BYTES[:0x80]],
            decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
            byte_fallback=True,
        )
    ),
    "word pieces": Kind(lambda: _words(models.WordPiece, decoders.WordPiece()), cleans_up=True),
    "word pieces without cleanup": Kind(lambda: _words(models.WordPiece, decoders.WordPiece("~~", cleanup=False))),
    "word level": Kind(lambda: _words(models.WordLevel, None), cleans_up=True),
    "ctc": Kind(lambda: _words(models.WordLevel, decoders.CTC())),
    "ctc without cleanup": Kind(lambda: _words(models.WordLevel, decoders.CTC("<pad>", "|", cleanup=False))),
    "fused, stripped at both ends": Kind(
        lambda: _bpe(WORDS, decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 1)]))
    ),
    "fused, replaced across tokens": Kind(
        lambda: _bpe(
            WORDS, decoders.Sequence([decoders.Fuse(), decoders.Replace("s▁", "<>"), decoders.Replace("▁", " ")])
        )
    ),
    "each token replaced by a pattern": Kind(
        lambda: _bpe(
            WORDS, decoders.Sequence([decoders.Replace(Regex("[sd▁]+"), "_"), decoders.WordPiece(cleanup=False)])
        )
    ),
    "fused text replaced by a pattern": Kind(
        lambda: _bpe(WORDS, decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("[sd▁]+"), "_")]))
    ),
    "suffixes, then fused word pieces": Kind(
        lambda: _bpe(WORDS, decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse(), decoders.WordPiece()]))
    ),
}
"""Kinds of tokenizer.json files by name."""


def _gguf_byte_level() -> dict[str, Any]:
    alphabet = byte_level_alphabet()
    pieces = ["".join(alphabet[byte] for byte in piece) for piece in BYTE_PIECES]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet.values(), *pieces, "ab", *SPECIALS, "<tool> é"],
        "tokenizer.ggml.token_type": [1] * (257 + len(pieces)) + [3] * len(SPECIALS) + [4],
        "tokenizer.ggml.merges": ["a b"],
    }


def _gguf_sentencepiece(architecture: str) -> dict[str, Any]:
    words = [word for word in dict.fromkeys(WORDS) if word.strip(" ")]
    tokens = [*SPECIALS, *BYTES, *words, "<tool> é", "<unused>"]
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [6] * len(BYTES) + [1] * len(words) + [4, 5],
    }


GGUF_KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "gguf, gpt2": _gguf_byte_level,
    "gguf, llama": partial(_gguf_sentencepiece, "llama"),
    "gguf, llama of a Gemma": partial(_gguf_sentencepiece, "gemma2"),
}
"""Functions that make the metadata of GGUF files, by the name of the kind."""


def make_pair(name: str, folder: Path) -> TokenizerPair:
    """Write the files of a kind to ``folder``, and load them as pdserve does and as transformers does."""
    if name in GGUF_KINDS:
        return _gguf_pair(write_metadata(folder / "tokenizer.gguf", GGUF_KINDS[name]()))
    from transformers import PreTrainedTokenizerFast

    kind = KINDS[name]
    backend = kind.make()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens(ADDED)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": kind.cleans_up}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))

    def decode(token_ids: Sequence[int], skip: bool) -> str:
        try:
            return str(theirs.decode(list(token_ids), skip_special_tokens=skip))
        except BaseException as e:
            # The library panics when it strips the end of a text that is empty.
            if type(e).__name__ != "PanicException":
                raise
            return ""

    return _pair(tokenizer_from_folder(folder), decode, backend)


def _gguf_pair(path: Path) -> TokenizerPair:
    ours = tokenizer_from_gguf(read_gguf_metadata(path))
    backend = ours.backend
    return _pair(ours, lambda ids, skip: str(backend.decode(list(ids), skip_special_tokens=skip)), backend)


def _pair(ours: TextTokenizer, theirs: Callable[[Sequence[int], bool], str], backend: Tokenizer) -> TokenizerPair:
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    return TokenizerPair(ours, theirs, tokens, frozenset(i for i, token in tokens.items() if token in SPECIALS))


def draw_ids(rng: random.Random, pair: TokenizerPair, longest: int = 32) -> list[int]:
    """Draw token ids: words, runs of special tokens, runs of bytes, repeated ids, and ids that are no token."""
    everything = sorted(pair.tokens)
    groups = [everything, sorted(pair.specials), [*everything, max(everything) + 1, max(everything) + 9]]
    characters = [i for i, token in pair.tokens.items() if token in BYTES] or everything
    words = [i for i, token in pair.tokens.items() if token not in BYTES]
    ids: list[int] = []
    for _ in range(rng.randrange(8)):
        match rng.randrange(6):
            case 0:
                ids += rng.choices(characters, k=rng.randrange(1, 6))
            case 1:
                ids += _bytes_of(rng.choice("é你😀ßa\u0301"), pair) or [rng.choice(words)]
            case 2:
                ids += [rng.choice(words)] * rng.randrange(1, 4)
            case 3:
                ids += rng.choices(words, k=rng.randrange(1, 6))
            case _:
                ids += rng.choices(rng.choice(groups), k=rng.randrange(1, 8))
    return ids[:longest]


def _bytes_of(text: str, pair: TokenizerPair) -> list[int]:
    ids = {token: token_id for token_id, token in pair.tokens.items()}
    return [ids[BYTES[byte]] for byte in text.encode() if BYTES[byte] in ids]
