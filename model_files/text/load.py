"""Finds and loads the tokenizer and the chat template that the options name. Does not import torch."""

from __future__ import annotations

from ..options import ModelOptions
from .gguf_metadata import read_gguf_metadata
from .gguf_tokenizer import tokenizer_from_gguf
from .hf_tokenizer import tokenizer_from_folder
from .named_templates import NamedTemplates
from .template_source import find_tokenizer, read_template_file
from .text_tokenizer import TextTokenizer


def load_tokenizer(options: ModelOptions) -> TextTokenizer:
    """Load the tokenizer of ``tokenizer_path``, else of the model; raises ``TokenizerLoadError`` or ``ModelError``."""
    source = find_tokenizer(options)
    if source.kind == "gguf":
        return tokenizer_from_gguf(read_gguf_metadata(source.path))
    return tokenizer_from_folder(source.path)


def find_chat_template(options: ModelOptions, tokenizer: TextTokenizer) -> NamedTemplates | None:
    """Return the template of the options, else the tokenizer's own, else None; raises ``TokenizerLoadError``."""
    if options.chat_template is None:
        return tokenizer.chat_template
    return read_template_file(options.chat_template)
