"""The vocabulary as llguidance needs it: the bytes of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from ...model_files.errors import UnsupportedModel
from ...model_files.grammar.vocabulary import why_no_grammars
from ...model_files.options import ModelOptions
from ...model_files.text.load import load_tokenizer
from ...model_files.text.text_tokenizer import FastTokenizer


class GrammarTokenizer(NamedTuple):
    """llguidance's tokenizer of one model."""

    tokens: LLTokenizer
    special_id: Callable[[str], int | None]
    """Returns the id of a special token by its text; None for a text that is none."""


class _Vocabulary(TokenizerWrapper):
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, backend: Tokenizer, pieces: list[bytes], special_ids: frozenset[int], eos: list[int]) -> None:
        self.tokens = pieces
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos[0]
        self._backend = backend

    def __call__(self, text: str) -> list[int]:
        """Tokenise ``text``, which a grammar demands next in the output; [] if the tokens do not spell it exactly.

        A special token's text is plain text here: a schema that names one must not end the output.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        # A tokenizer may have tokens that the model has no logits for.
        is_whole = all(token < len(self.tokens) for token in ids)
        return ids if is_whole and b"".join(self.tokens[token] for token in ids) == text.encode() else []


def load_grammar_tokenizer(options: ModelOptions, vocab_size: int) -> GrammarTokenizer:
    """Load the tokenizer of a model with ``vocab_size`` logits, and return its vocabulary as llguidance takes it.

    Raises ``ModelError`` if grammars can't be matched with it, or ``TokenizerLoadError``.
    """
    tokenizer = load_tokenizer(options)
    if reason := why_no_grammars(tokenizer, vocab_size):
        raise UnsupportedModel(reason)
    assert isinstance(tokenizer, FastTokenizer), "checked just now"
    table = tokenizer.byte_table
    assert table is not None, "checked just now"
    eos = [token for token in tokenizer.eos_ids if token < vocab_size]
    backend = tokenizer.backend
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    added = backend.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special and number < vocab_size}
    pieces = table.pieces[:vocab_size]
    pieces += [b""] * (vocab_size - len(pieces))
    vocabulary = _Vocabulary(backend, pieces, frozenset(special.values()), eos)
    return GrammarTokenizer(LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=eos), special.get)
