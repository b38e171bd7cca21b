"""The tokens of a GGUF file (``tokenizer.ggml.*``), and what tokenizers of every kind do with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, processors

from ..errors import shortened
from .errors import TokenizerLoadError
from .gguf_metadata import GGUFMetadata


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
ELSEWHERE = "give the model's Hugging Face folder as --tokenizer-path"
"""Advice for a file with a tokenizer that can't be used."""
# A chat model may end its turn with another token than a text; a GGUF file names each apart.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True)
class GGUFVocabulary:
    """``tokens[token_id]`` and their types. Methods raise ``TokenizerLoadError`` for tables that disagree."""

    metadata: GGUFMetadata
    tokens: list[str]
    types: list[int]

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of control tokens and of the unknown token."""
        return frozenset(i for i, kind in enumerate(self.types) if kind in SPECIAL_TYPES)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids that end a text, each once."""
        found = [self.token_id(key) for key in EOS_KEYS]
        return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))

    @property
    def named_ids(self) -> dict[str, int]:
        """Return the ids that the file names, by the names that chat templates print ("bos_token", …)."""
        found = {name: self.token_id(f"{key}_token_id") for name, key in NAMED_TOKENS.items()}
        return {name: token_id for name, token_id in found.items() if token_id is not None}

    def token_id(self, key: str) -> int | None:
        """Return the id that the file states under ``key``, or None if it states none."""
        token_id, size = self.metadata.integer(f"tokenizer.ggml.{key}"), len(self.tokens)
        if token_id is not None and not 0 <= token_id < size:
            raise TokenizerLoadError(
                f"{self.metadata.path}: {key} {token_id} is outside the vocabulary of {size} tokens"
            )
        return token_id

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges that the file lists, best first."""
        known = set(self.tokens)
        merges = [self._split_merge(merge) for merge in self.metadata.strings("tokenizer.ggml.merges")]
        for pair in merges:
            if not {*pair, "".join(pair)} <= known:
                raise TokenizerLoadError(
                    f"{self.metadata.path}: merge {shortened(repr(' '.join(pair)))} is of tokens that "
                    f"tokenizer.ggml.tokens lacks; {ELSEWHERE}"
                )
        return merges

    def check_distinct(self) -> None:
        """Raise ``TokenizerLoadError`` if several ids have the same token."""
        if len(set(self.tokens)) < len(self.tokens):
            token, count = Counter(self.tokens).most_common(1)[0]
            raise TokenizerLoadError(f"{self.metadata.path}: {count} tokens are {shortened(repr(token))}; {ELSEWHERE}")

    def add_to(self, backend: Tokenizer, special_ids: frozenset[int]) -> None:
        """Make ``backend`` find special and user-defined tokens whole in a text."""
        special = [token for i, token in enumerate(self.tokens) if i in special_ids]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        for i, token in enumerate(self.tokens):
            if self.types[i] == TokenType.USER_DEFINED and i not in special_ids:
                backend.add_tokens([AddedToken(token, special=False, normalized=False)])

    def surround(self, backend: Tokenizer, *, add_bos: bool) -> None:
        """Make ``backend`` put BOS and EOS around plain texts, as far as the file asks for them.

        ``add_bos``: whether a file without the key asks for BOS.
        """
        wanted = {
            "bos_token": self.metadata.boolean("tokenizer.ggml.add_bos_token", add_bos),
            "eos_token": self.metadata.boolean("tokenizer.ggml.add_eos_token", False),
        }
        around = {name: token_id for name, token_id in self.named_ids.items() if wanted.get(name)}
        if not around:
            return
        single = [self.tokens[around[name]] if name in around else None for name in wanted]
        backend.post_processor = processors.TemplateProcessing(
            single=[part for part in (single[0], "$A", single[1]) if part is not None],
            special_tokens=[(self.tokens[token_id], token_id) for token_id in set(around.values())],
        )

    def _split_merge(self, merge: str) -> tuple[str, str]:
        left, space, right = merge.partition(" ")
        if not space:
            raise TokenizerLoadError(f"{self.metadata.path}: merge {shortened(repr(merge))} does not name two tokens")
        return left, right


def read_vocabulary(metadata: GGUFMetadata) -> GGUFVocabulary:
    """Read the table of tokens. Raises ``TokenizerLoadError``."""
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise TokenizerLoadError(f"{metadata.path}: {len(tokens)} tokens, but {len(types)} token types")
    return GGUFVocabulary(metadata, tokens, types)
