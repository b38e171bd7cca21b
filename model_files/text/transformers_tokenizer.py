"""The slow road: tokenizers that only ``transformers`` can load. Imported for folders without a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from .byte_table import ByteTable
from .errors import TokenizerLoadError
from .hf_files import backend_byte_table, find_eos_ids
from .library_errors import library_errors
from .named_templates import NamedTemplates
from .text_tokenizer import UNKNOWN_TOKEN_BYTES, FastTokenizer, TextTokenizer

FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Files that transformers makes tokenizers of, beside tokenizer_config.json."""


class PythonTokenizer(TextTokenizer):
    """A ``transformers`` tokenizer without a ``tokenizers`` backend."""

    byte_table: ByteTable | None = None
    max_token_bytes = UNKNOWN_TOKEN_BYTES

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: tuple[int, ...],
        special_tokens: Mapping[str, str],
        chat_template: NamedTemplates | None,
    ) -> None:
        super().__init__(eos_ids, special_tokens, chat_template)
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Encode the texts one by one, by ``transformers``."""
        return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode by ``transformers``, without cleaning up spaces before punctuation."""
        # Cleaning up spaces around punctuation would take back text that was already sent.
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def is_left_out(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether the id is a special token and these are skipped. Ids without a token are not recognised."""
        return skip_special_tokens and token_id in self._special_ids


def tokenizer_from_transformers(
    folder: Path, named: Mapping[str, str], template: NamedTemplates | None
) -> TextTokenizer:
    """Load the tokenizer of ``folder`` through transformers. Raises ``TokenizerLoadError`` if transformers finds none.

    ``named``: special tokens by name, which replace those that transformers knows. ``template``: the chat template.
    """
    with library_errors(partial(_unusable, folder)):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    special_tokens = {**{k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}, **named}
    eos_ids = find_eos_ids(folder, tokenizer.eos_token_id)
    if not tokenizer.is_fast:
        return PythonTokenizer(tokenizer, eos_ids, special_tokens, template)
    backend = tokenizer.backend_tokenizer
    decoder = msgspec.json.decode(backend.to_str(), type=dict[str, Any]).get("decoder")
    return FastTokenizer(
        make_backend=lambda: backend,
        make_byte_table=partial(backend_byte_table, folder, backend, decoder, frozenset(tokenizer.all_special_ids)),
        eos_ids=eos_ids,
        special_tokens=special_tokens,
        chat_template=template,
    )


def _unusable(folder: Path, reason: str) -> TokenizerLoadError:
    """Name the files that transformers may have read, because its errors name none."""
    files = [name for name in (*FILES, "tokenizer_config.json") if (folder / name).is_file()]
    return TokenizerLoadError(
        f"{folder} has no tokenizer.json, and transformers makes no tokenizer of "
        f"{' and '.join(files) or 'its other files'} there: {reason}. Give another folder as --tokenizer-path"
    )
