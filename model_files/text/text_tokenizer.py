"""A model's tokenizer as the server sees it, whatever library is behind it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from tokenizers import Tokenizer

from .byte_table import ByteTable
from .decoding_chain import DecodingChain, make_decoding_chain
from .decoding_steps import CLEANUP, NO_CONTRACTIONS
from .errors import PromptError, TokenizerLoadError
from .library_errors import library_errors
from .named_templates import NamedTemplates

UNKNOWN_TOKEN_BYTES = 1024
MAX_VOCABULARY = 1 << 24
"""Ids that a vocabulary may have: sixty times those of the largest published one."""
LONG_TEXT = 1 << 12
"""Characters from which on a single text is encoded as a batch of one: it takes half the time, as a batch has no
offsets."""


class TextTokenizer(ABC):
    """Text to token ids and back.

    ``eos_ids`` end a text. ``special_tokens`` are the named ones ("bos_token", …) that chat templates print.
    """

    cleans_up = False
    """Whether ``decode`` removes spaces before punctuation, as ``clean_up_tokenization_spaces`` asks for."""

    def __init__(
        self, eos_ids: tuple[int, ...], special_tokens: Mapping[str, str], chat_template: NamedTemplates | None
    ) -> None:
        self.eos_ids = eos_ids
        self.special_tokens = special_tokens
        self.chat_template = chat_template

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text. ``add_special_tokens``: add what the model wants around a plain text (often a
        BOS).
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the ids; ids without a token are left out."""

    @abstractmethod
    def is_left_out(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether ``decode`` ignores this id, whatever its neighbours are."""

    @property
    @abstractmethod
    def byte_table(self) -> ByteTable | None:
        """Return the bytes that each token stands for; None if a token's text depends on its neighbours."""

    @property
    def decoding_chain(self) -> DecodingChain | None:
        """Return the steps of the tokenizer's decoder; None if they are not known."""
        return None

    @property
    @abstractmethod
    def max_token_bytes(self) -> int:
        """Return an upper bound of the bytes of text that one token stands for.

        Texts that can't fit the context by this bound are refused before they are tokenized.
        """


class FastTokenizer(TextTokenizer):
    """A tokenizer of the ``tokenizers`` library.

    ``make_backend`` and ``make_byte_table`` run when first needed, because each takes a good part of a process's start.
    The tokenizer process uses the first, and the detokenizer process mostly the second.
    """

    def __init__(
        self,
        make_backend: Callable[[], Tokenizer],
        make_byte_table: Callable[[], ByteTable | None],
        eos_ids: tuple[int, ...],
        special_tokens: Mapping[str, str],
        chat_template: NamedTemplates | None,
        *,
        cleans_up: bool = False,
    ) -> None:
        super().__init__(eos_ids, special_tokens, chat_template)
        self._make_backend = make_backend
        self._make_byte_table = make_byte_table
        self.cleans_up = cleans_up
        self._contractions = CLEANUP if cleans_up else NO_CONTRACTIONS

    @cached_property
    def backend(self) -> Tokenizer:
        """Return the library's tokenizer, made on first use, without truncation or padding."""
        backend = self._make_backend()
        del self._make_backend  # with the tables that it was made of
        # A tokenizer.json may carry a training run's limits; the server's own checks speak up instead of cutting.
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def byte_table(self) -> ByteTable | None:
        """Return the bytes that each token stands for; None if a token's text depends on its neighbours.

        Made on first use.
        """
        table = self._make_byte_table()
        del self._make_byte_table
        return table

    @cached_property
    def decoding_chain(self) -> DecodingChain:
        """Return the steps of the library tokenizer's decoder, made on first use."""
        return make_decoding_chain(self.backend)

    @cached_property
    def max_token_bytes(self) -> int:
        """Return the bytes of the longest token, or ``UNKNOWN_TOKEN_BYTES`` without a byte table.

        With a normalizer, which may shorten the text, it is four times that.
        """
        # A normalizer may shorten the text before it is cut into tokens: composing makes one character of up to four.
        table = self.byte_table
        longest = max(map(len, table.pieces), default=1) if table else UNKNOWN_TOKEN_BYTES
        return longest * (4 if self.backend.normalizer else 1)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Encode the texts by the ``tokenizers`` library, a single short one without its thread pool.

        Raises ``PromptError`` for a text that the library can't encode.
        """
        with library_errors(_unencodable):
            if len(texts) == 1 and len(texts[0]) < LONG_TEXT:  # no thread pool for the common case
                return [self.backend.encode(texts[0], add_special_tokens=add_special_tokens).ids]
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode by the library, or by ``decoding_chain`` without a byte table.

        Spaces are cleaned up if ``cleans_up``.
        """
        if self.byte_table is not None:
            text = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            # Some of the library's decoders panic, for example where a text is shorter than what they strip.
            left_out = partial(self.is_left_out, skip_special_tokens=skip_special_tokens)
            text = self.decoding_chain.decode(itertools.filterfalse(left_out, token_ids))
        return self._contractions.apply(text)

    def is_left_out(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether the id has no token, or is a special token and these are skipped."""
        return (skip_special_tokens and token_id in self._special_ids) or self.backend.id_to_token(token_id) is None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)


def _unencodable(reason: str) -> PromptError:
    return PromptError("text", f"the model's tokenizer can't encode this text: {reason}")


def vocabulary_tokens(backend: Tokenizer) -> list[str | None]:
    """Return the tokens by id, added ones included; None for an id without a token.

    Raises ``TokenizerLoadError`` for an id that no vocabulary has.
    """
    vocab = backend.get_vocab(with_added_tokens=True)
    largest = max(vocab, key=vocab.__getitem__, default="")
    size = vocab.get(largest, -1) + 1
    if size > MAX_VOCABULARY:
        raise TokenizerLoadError(
            f"token {largest[:40]!r} has the id {size - 1}, and {MAX_VOCABULARY - 1} is the largest"
        )
    tokens: list[str | None] = [None] * size
    for token, token_id in vocab.items():
        tokens[token_id] = token
    return tokens
