"""What a model can take, read from its config without loading it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...model_runner.model_path import ModelSource
from .errors import TokenizerLoadError
from .gguf_metadata import read_gguf_metadata
from .hf_tokenizer import read_json_object

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


class ModelLimits(NamedTuple):
    """``context_length``: prompt plus output, in tokens. Token ids are in [0, ``vocab_size``)."""

    context_length: int
    vocab_size: int


def read_limits(source: ModelSource, context_length: int | None) -> ModelLimits:
    """The model's limits; ``context_length`` replaces its own. Raises ``TokenizerLoadError`` for an unknown one."""
    own_length, vocab_size = _gguf_limits(source) if source.kind == "gguf" else _config_limits(source)
    length = context_length or own_length
    if length is None:
        raise TokenizerLoadError(f"{source.path} does not say how long a context may be; give --context-length")
    if vocab_size is None:
        raise TokenizerLoadError(f"{source.path} does not say how large its vocabulary is (vocab_size in config.json)")
    return ModelLimits(length, vocab_size)


def _gguf_limits(source: ModelSource) -> tuple[int | None, int | None]:
    metadata = read_gguf_metadata(source.path)
    architecture = metadata.string("general.architecture")
    vocab_size = metadata.integer(f"{architecture}.vocab_size") or len(metadata.strings("tokenizer.ggml.tokens"))
    return metadata.integer(f"{architecture}.context_length"), vocab_size


def _config_limits(source: ModelSource) -> tuple[int | None, int | None]:
    config = read_json_object(source.path / "config.json")
    nested = config.get("text_config")
    if isinstance(nested, dict):  # models that also see or hear keep their language part's limits apart
        config = config | nested
    lengths = (_positive(config.get(key)) for key in CONTEXT_KEYS)
    return next((length for length in lengths if length is not None), None), _positive(config.get("vocab_size"))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
