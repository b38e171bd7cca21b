"""What the JSON files of a Hugging Face folder say of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import shortened
from .byte_table import ByteTable, table_for_decoder
from .errors import TokenizerLoadError
from .template_source import read_json_object
from .text_tokenizer import MAX_VOCABULARY, vocabulary_tokens


def backend_byte_table(source: Path, backend: Tokenizer, decoder: Any, special_ids: frozenset[int]) -> ByteTable | None:
    """Make the byte table of a tokenizer with this ``decoder`` section.

    It is None if a token's text depends on its neighbours. Raises ``TokenizerLoadError``, which names ``source``.
    """
    try:
        tokens = vocabulary_tokens(backend)
    except TokenizerLoadError as e:
        raise TokenizerLoadError(f"{source}: {e}; download it again") from e
    return table_for_decoder(decoder, tokens, special_ids)


def find_eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return all end-of-text ids: those in the folder's generation config and model config, and the tokenizer's.

    ``tokenizer_eos``: the tokenizer's own EOS; None if it has none. Ids that no vocabulary can have are left out.
    Raises ``TokenizerLoadError``.
    """
    ids: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        config = read_json_object(folder / name)
        for stated in (config, config.get("text_config")):
            value = stated.get("eos_token_id") if isinstance(stated, dict) else None
            listed = value if isinstance(value, list) else [] if value is None else [value]
            if any(not isinstance(token_id, int) or isinstance(token_id, bool) for token_id in listed):
                raise TokenizerLoadError(
                    f"{folder / name}: eos_token_id {shortened(repr(value))} is no token id, and no list of them"
                )
            # No token has another id, so it never ends a text.
            ids |= dict.fromkeys(token_id for token_id in listed if 0 <= token_id < MAX_VOCABULARY)
    if tokenizer_eos is not None:
        ids[tokenizer_eos] = None
    return tuple(ids)
