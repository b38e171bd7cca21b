"""What structured output needs of a model's tokenizer."""

from __future__ import annotations

from ..text.text_tokenizer import FastTokenizer, TextTokenizer


def why_no_grammars(tokenizer: TextTokenizer, vocab_size: int) -> str:
    """Return why no grammar can hold for outputs of a model with ``vocab_size`` logits; empty if one can."""
    if not isinstance(tokenizer, FastTokenizer) or tokenizer.byte_table is None:
        return "structured output needs a tokenizer whose tokens stand for bytes, which this model's do not"
    if not any(token < vocab_size for token in tokenizer.eos_ids):
        return "structured output needs an EOS token, which this model does not have"
    return ""
