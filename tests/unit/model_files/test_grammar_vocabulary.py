"""Tokenizers that cannot hold an output to a grammar."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pdserve.messages.grammar import Grammar
from pdserve.model_files.grammar.errors import GrammarError
from pdserve.model_files.grammar.limited_check import LimitedCheck
from pdserve.model_files.grammar.vocabulary import why_no_grammars
from pdserve.model_files.text.byte_table import ByteTable
from pdserve.model_files.text.text_tokenizer import FastTokenizer
from pdserve.server.options import ServerOptions
from pdserve.server.tokenizer_process import choose_grammar_checks

BYTES = ByteTable([b"a", b""], frozenset({1}), strip_first_space=False)


def tokenizer(table: ByteTable | None, eos_ids: tuple[int, ...]) -> FastTokenizer:
    return FastTokenizer(lambda: Tokenizer(WordLevel({"a": 0})), lambda: table, eos_ids, {}, None)


@pytest.mark.parametrize(
    ("table", "eos_ids", "reason"),
    [
        (BYTES, (7, 1), ""),
        (BYTES, (7,), "needs an EOS token"),
        (BYTES, (), "needs an EOS token"),
        (None, (1,), "tokens stand for bytes"),
    ],
)
def test_a_tokenizer_that_cannot_serve_grammars_is_told_with_the_reason(
    table: ByteTable | None, eos_ids: tuple[int, ...], reason: str
) -> None:
    found = why_no_grammars(tokenizer(table, eos_ids), 2)
    assert reason in found
    assert bool(found) is bool(reason)


def test_the_server_refuses_grammars_for_it() -> None:
    options = ServerOptions(model_path="x")
    assert isinstance(choose_grammar_checks(options, tokenizer(BYTES, (1,)), 2), LimitedCheck)
    with pytest.raises(GrammarError, match="tokens stand for bytes"):
        choose_grammar_checks(options, tokenizer(None, (1,)), 2).check(Grammar("regex", "a"))
    off = ServerOptions(model_path="x", grammar_backend="none")
    with pytest.raises(GrammarError, match="--grammar-backend none"):
        choose_grammar_checks(off, tokenizer(BYTES, (1,)), 2).check(Grammar("regex", "a"))
