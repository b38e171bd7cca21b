"""SentencePiece's BPE from a GGUF file: ``tokenizer.ggml.model`` "llama" (Llama 2, Mistral, TinyLlama, Gemma, Phi-3).

The file has a score for each token, and mostly no merges. Two neighbours merge if a token is both together, and the
merge of the best score comes first. Characters that no token is become tokens of their bytes, like "<0x0A>".

Where a file does not say what its family's own tokenizer does, its architecture decides, as in transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ..errors import shortened
from .byte_table import SENTENCEPIECE_SPACE, byte_fallback_table
from .errors import TokenizerLoadError
from .gguf_vocabulary import ELSEWHERE, GGUFVocabulary, TokenType
from .template_source import templates_in_gguf
from .text_tokenizer import FastTokenizer

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
LONGEST_TOKEN = 256
"""Maximum characters of a token. Looking for its merges takes the square of its length."""
GEMMA = ("gemma", "gemma2", "gemma3")
PHI3 = ("phi3",)


class Prefix(Enum):
    """Texts that get a space before them."""

    NONE = auto()
    FIRST = auto()
    """A prompt, if no added token begins it, and if it begins with no space."""
    EACH = auto()
    """Every text between added tokens."""


def sentencepiece_tokenizer(vocabulary: GGUFVocabulary) -> FastTokenizer:
    """Make the SentencePiece tokenizer of ``vocabulary``. Raises ``TokenizerLoadError`` for a broken table."""
    metadata = vocabulary.metadata
    architecture = metadata.string("general.architecture")
    add_prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    if architecture in GEMMA:
        # Gemma's scores are no ranks: its tokens are in the order of their merges.
        vocabulary = _with_marks(vocabulary)
        prefix, ranks = Prefix.NONE, [-float(i) for i in range(len(vocabulary.tokens))]
    else:
        prefix = (Prefix.EACH if architecture in PHI3 else Prefix.FIRST) if add_prefix else Prefix.NONE
        ranks = _scores(vocabulary)
    _check(vocabulary)
    user_defined = {i for i, kind in enumerate(vocabulary.types) if kind == TokenType.USER_DEFINED}
    special_ids = vocabulary.special_ids | (frozenset(vocabulary.named_ids.values()) - user_defined)
    return FastTokenizer(
        make_backend=partial(_build_backend, vocabulary, ranks, prefix, special_ids),
        make_byte_table=partial(
            byte_fallback_table, vocabulary.tokens, special_ids, strip_first_space=prefix is not Prefix.NONE
        ),
        eos_ids=vocabulary.eos_ids,
        special_tokens={name: vocabulary.tokens[token_id] for name, token_id in vocabulary.named_ids.items()},
        chat_template=templates_in_gguf(metadata),
    )


def _with_marks(vocabulary: GGUFVocabulary) -> GGUFVocabulary:
    """Return ``vocabulary`` with tokens of spaces alone spelled as in SentencePiece, and as normal tokens.

    So merges can make them. A GGUF of Gemma has them as user-defined tokens, with spaces as they are.
    """
    tokens, types = list(vocabulary.tokens), list(vocabulary.types)
    for i, token in enumerate(vocabulary.tokens):
        if token and not token.strip(" "):
            tokens[i], types[i] = SENTENCEPIECE_SPACE * len(token), TokenType.NORMAL
    return dataclasses.replace(vocabulary, tokens=tokens, types=types)


def _scores(vocabulary: GGUFVocabulary) -> list[float]:
    """Return the score of each token, or zeros from a file that lists its merges instead."""
    metadata, count = vocabulary.metadata, len(vocabulary.tokens)
    if _lists_merges(vocabulary) and "tokenizer.ggml.scores" not in metadata.values:
        return [0.0] * count
    scores = metadata.floats("tokenizer.ggml.scores")
    if len(scores) != count:
        raise TokenizerLoadError(f"{metadata.path}: {count} tokens, but {len(scores)} scores; {ELSEWHERE}")
    for token, score in zip(vocabulary.tokens, scores, strict=True):
        if math.isnan(score):
            raise TokenizerLoadError(
                f"{metadata.path}: the score of token {shortened(repr(token))} is not a number; {ELSEWHERE}"
            )
    return scores


def _lists_merges(vocabulary: GGUFVocabulary) -> bool:
    return "tokenizer.ggml.merges" in vocabulary.metadata.values


def _check(vocabulary: GGUFVocabulary) -> None:
    """Raise ``TokenizerLoadError`` if a byte has no token, ids share a token, or a token is too long.

    The most is ``LONGEST_TOKEN`` characters, because merges are searched in each token. Without a token for each byte,
    a text could lose characters.
    """
    vocabulary.check_distinct()
    known, path = set(vocabulary.tokens), vocabulary.metadata.path
    missing = next((token for token in BYTE_TOKENS if token not in known), None)
    if missing is not None:
        raise TokenizerLoadError(f"{path}: no token is the byte {missing}; {ELSEWHERE}")
    longest = max(vocabulary.tokens, key=len)
    if len(longest) > LONGEST_TOKEN:
        raise TokenizerLoadError(
            f"{path}: token {shortened(repr(longest))} has {len(longest)} characters, and {LONGEST_TOKEN} is the "
            f"most; {ELSEWHERE}"
        )


def _build_backend(
    vocabulary: GGUFVocabulary, ranks: Sequence[float], prefix: Prefix, special_ids: frozenset[int]
) -> Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = vocabulary.merges() if _lists_merges(vocabulary) else _merges(ids, ranks)
    backend = Tokenizer(BPE(ids, merges, byte_fallback=True))
    mark = SENTENCEPIECE_SPACE
    spaces = normalizers.Replace(" ", mark)
    match prefix:
        case Prefix.NONE:
            backend.normalizer = spaces
        case Prefix.EACH:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(mark), spaces])
        case Prefix.FIRST:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(mark, prepend_scheme="first", split=False)
    steps = [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix is not Prefix.NONE:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    vocabulary.add_to(backend, special_ids)
    vocabulary.surround(backend, add_bos=True)
    return backend


def _merges(ids: dict[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that together are a token, best first: by the larger rank of that token.

    ``ids``: each token's id. ``ranks``: by id. Of equal ranks, the pair with the longer first token comes first, and
    then that with the longer second one.
    """
    found = [
        (ranks[token_id], token[:cut], token[cut:])
        for token, token_id in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]
