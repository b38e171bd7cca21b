"""Builds a tokenizer from the metadata of a GGUF file (``tokenizer.ggml.*``)."""

from __future__ import annotations

from ..errors import shortened
from .errors import TokenizerLoadError
from .gguf_byte_level import byte_level_tokenizer
from .gguf_metadata import GGUFMetadata
from .gguf_sentencepiece import sentencepiece_tokenizer
from .gguf_vocabulary import read_vocabulary
from .text_tokenizer import FastTokenizer

BUILDERS = {"gpt2": byte_level_tokenizer, "llama": sentencepiece_tokenizer}
"""Functions that make a tokenizer, by ``tokenizer.ggml.model``."""


def tokenizer_from_gguf(metadata: GGUFMetadata) -> FastTokenizer:
    """Make the tokenizer of a GGUF file.

    Raises ``TokenizerLoadError`` for a broken table or an unsupported kind; then it names the supported ones.
    """
    model = metadata.string("tokenizer.ggml.model")
    if model not in BUILDERS:
        raise TokenizerLoadError(
            f"{metadata.path} has a tokenizer of kind {shortened(repr(model))}; from GGUF 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece) are supported. Give the model's Hugging Face folder as --tokenizer-path"
        )
    return BUILDERS[model](read_vocabulary(metadata))
