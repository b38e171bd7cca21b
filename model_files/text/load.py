"""Finds and loads the tokenizer and the chat template that the options name. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelNotFound
from ..model_path import ModelSource, resolve_model
from ..options import ModelOptions
from .errors import TokenizerLoadError
from .gguf_metadata import read_gguf_metadata
from .gguf_tokenizer import tokenizer_from_gguf
from .hf_tokenizer import find_template_in_folder, tokenizer_from_folder
from .text_tokenizer import TextTokenizer


def load_tokenizer(options: ModelOptions) -> TextTokenizer:
    """Load the tokenizer of ``tokenizer_path``, else of the model; raises ``TokenizerLoadError`` or ``ModelError``."""
    source = _find_tokenizer(options)
    if source.kind == "gguf":
        return tokenizer_from_gguf(read_gguf_metadata(source.path))
    return tokenizer_from_folder(source.path)


def read_chat_template(options: ModelOptions) -> str | None:
    """Return the template of the options, else the model's own, else None, without loading a tokenizer.

    Raises ``TokenizerLoadError`` or ``ModelError``.
    """
    if options.chat_template is not None:
        return _read_template_file(options.chat_template)
    source = _find_tokenizer(options)
    if source.kind == "gguf":
        return read_gguf_metadata(source.path).string("tokenizer.chat_template")
    return find_template_in_folder(source.path)


def find_chat_template(options: ModelOptions, tokenizer: TextTokenizer) -> str | None:
    """Return the template of the options, else the tokenizer's own, else None; raises ``TokenizerLoadError``."""
    if options.chat_template is None:
        return tokenizer.chat_template
    return _read_template_file(options.chat_template)


def _read_template_file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TokenizerLoadError(f"--chat-template {path} can't be read: {e}") from e


def _find_tokenizer(options: ModelOptions) -> ModelSource:
    path = options.tokenizer_path
    if path is None:
        return resolve_model(options.model_path, revision=options.revision, weights=False)
    folder = Path(path).expanduser()
    # A folder with only a tokenizer is no model, but all that is needed here.
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return ModelSource("hf", folder)
    try:
        return resolve_model(path, revision=options.tokenizer_revision, weights=False)
    except ModelNotFound as e:
        raise TokenizerLoadError(f"--tokenizer-path leads nowhere: {e}") from e
