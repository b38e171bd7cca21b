"""What a model can take, as its worker will say, but known before any worker runs. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from .context_length import choose_context_length
from .foreign_config import read_foreign
from .model_impl import ModelImpl, Wanted, choose_model_impl
from .model_path import ModelSource
from .spec_reader import read_spec


class ModelLimits(NamedTuple):
    """``context_length``: prompt plus output, in tokens. Token ids are in [0, ``vocab_size``)."""

    context_length: int
    vocab_size: int


def read_limits(source: ModelSource, context_length: int | None, model_impl: Wanted = "auto") -> ModelLimits:
    """Read the model's context length and vocabulary size, without its weights. Raises ``ModelError``.

    ``context_length``: a shorter context to serve, in tokens; None: the model's limit.
    """
    is_native = choose_model_impl(model_impl, source) is ModelImpl.NATIVE
    model = read_spec(source) if is_native else read_foreign(source)
    return ModelLimits(choose_context_length(model, context_length), model.vocab_size)
