"""Loads a tokenizer from a Hugging Face folder: ``tokenizer.json`` through the ``tokenizers`` library alone.

``transformers`` is imported only for a folder without a ``tokenizer.json``; importing it takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from .errors import TokenizerLoadError
from .hf_files import backend_byte_table, find_eos_ids
from .template_source import find_template_in_folder, read_json_object
from .text_tokenizer import FastTokenizer, TextTokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _AddedTokenEntry(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The small parts of a tokenizer.json; the vocabulary is skipped unread."""

    added_tokens: list[_AddedTokenEntry] = []
    decoder: dict[str, Any] | None = None


def tokenizer_from_folder(folder: Path) -> TextTokenizer:
    """Make the folder's tokenizer; raises ``TokenizerLoadError``."""
    config = read_json_object(folder / "tokenizer_config.json") | read_json_object(folder / "special_tokens_map.json")
    named = {name: text for name in NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    template = find_template_in_folder(folder, config)
    file = folder / "tokenizer.json"
    if not file.is_file():
        from .transformers_tokenizer import tokenizer_from_transformers

        return tokenizer_from_transformers(folder, named, template)
    data = file.read_bytes()
    try:
        parts = msgspec.json.decode(data, type=_TokenizerFile)
        backend = Tokenizer.from_buffer(data)
    except (msgspec.MsgspecError, ValueError) as e:
        raise TokenizerLoadError(f"{file} can't be read: {e}") from e
    special_ids = {entry.id for entry in parts.added_tokens if entry.special}
    special_ids |= _add_missing_tokens(backend, config)
    return FastTokenizer(
        make_backend=lambda: backend,
        make_byte_table=partial(backend_byte_table, backend, parts.decoder, frozenset(special_ids)),
        eos_ids=find_eos_ids(folder, backend.token_to_id(named["eos_token"]) if "eos_token" in named else None),
        special_tokens=named,
        chat_template=template,
        cleans_up=_cleans_up(backend, config),
    )


def _cleans_up(backend: Tokenizer, config: Mapping[str, Any]) -> bool:
    """Return whether decoded text is cleaned up. Like transformers, never that of BPE."""
    return bool(config.get("clean_up_tokenization_spaces")) and not isinstance(backend.model, BPE)


def _token_text(value: Any) -> str | None:
    """Return the text of a token in a config, which is a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(backend: Tokenizer, config: dict[str, Any]) -> set[int]:
    """Add the tokens that only tokenizer_config.json names; returns the ids of special ones among them.

    A token that the library would give another id than the config does is left out: the model knows it by the config's.
    """
    special_ids: set[int] = set()
    entries = config.get("added_tokens_decoder") or {}
    for key, entry in sorted(entries.items(), key=lambda pair: int(pair[0])):
        content, token_id = entry["content"], int(key)
        if backend.token_to_id(content) is not None or token_id != backend.get_vocab_size(with_added_tokens=True):
            continue
        special = bool(entry.get("special"))
        backend.add_tokens([AddedToken(content, special=special, normalized=bool(entry.get("normalized")))])
        if special:
            special_ids.add(token_id)
    return special_ids
