"""Loads a tokenizer from a Hugging Face folder: ``tokenizer.json`` through the ``tokenizers`` library alone.

``transformers`` is imported only for a folder without a ``tokenizer.json``; importing it takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

from .errors import TokenizerLoadError
from .hf_files import backend_byte_table, find_eos_ids
from .library_errors import library_errors
from .special_tokens import CONFIG, add_stated, read_stated_tokens
from .template_source import find_template_in_folder, read_json_object
from .text_tokenizer import FastTokenizer, TextTokenizer


class _TokenizerFile(msgspec.Struct):
    """The small parts of a tokenizer.json; the vocabulary is skipped unread."""

    decoder: dict[str, Any] | None = None


def tokenizer_from_folder(folder: Path) -> TextTokenizer:
    """Load the tokenizer of a Hugging Face folder, through transformers if it has no tokenizer.json.

    Raises ``TokenizerLoadError``.
    """
    config = read_json_object(folder / CONFIG)
    stated = read_stated_tokens(folder)
    template = find_template_in_folder(folder, config)
    file = folder / "tokenizer.json"
    if not file.is_file():
        from .transformers_tokenizer import tokenizer_from_transformers

        return tokenizer_from_transformers(folder, stated.named, template)
    with library_errors(partial(_unreadable, file)):
        data = file.read_bytes()
        parts = msgspec.json.decode(data, type=_TokenizerFile)
        backend = Tokenizer.from_buffer(data)
        # What a damaged post-processor names and the vocabulary lacks shows when it is used.
        backend.encode("")
    with library_errors(partial(_unreadable, folder / CONFIG)):
        add_stated(backend, stated)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    eos = stated.named.get("eos_token")
    return FastTokenizer(
        make_backend=lambda: backend,
        make_byte_table=partial(backend_byte_table, file, backend, parts.decoder, special_ids),
        eos_ids=find_eos_ids(folder, None if eos is None else backend.token_to_id(eos)),
        special_tokens=stated.named,
        chat_template=template,
        cleans_up=_cleans_up(backend, config),
    )


def _unreadable(file: Path, reason: str) -> TokenizerLoadError:
    return TokenizerLoadError(f"{file} can't be read: {reason}; correct it, or download it again")


def _cleans_up(backend: Tokenizer, config: Mapping[str, Any]) -> bool:
    """Return whether spaces before punctuation are removed from decoded text.

    Like transformers, never from that of BPE.
    """
    return bool(config.get("clean_up_tokenization_spaces")) and not isinstance(backend.model, BPE)
