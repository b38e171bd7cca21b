"""What the JSON files of a Hugging Face folder say of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .byte_table import ByteTable, table_for_decoder
from .template_source import read_json_object
from .text_tokenizer import vocabulary_tokens


def backend_byte_table(backend: Tokenizer, decoder: Any, special_ids: frozenset[int]) -> ByteTable | None:
    """Make the byte table of a tokenizer with this ``decoder`` section."""
    return table_for_decoder(decoder, vocabulary_tokens(backend), special_ids)


def find_eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return all ids that the folder's files name as end of text: generation config, model config, tokenizer."""
    ids: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(folder / name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                ids[token_id] = None
    if tokenizer_eos is not None:
        ids[tokenizer_eos] = None
    return tuple(ids)
