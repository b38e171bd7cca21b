"""Vectors of finished choices, and the base of the renderers that answer with them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import orjson

from ..engine.submission import Choice, Delta
from ..errors import ApiError, bad_request

F32 = npt.NDArray[np.float32]
ENDED = 409
"""HTTP status of a request that was ended from outside. A router does not repeat it."""


def vector_of(choice: Choice) -> F32:
    """Return the vector that was read from the choice's prompt. Raises ``ApiError`` if it was aborted before."""
    if choice.prompt is None or not choice.prompt.readout:
        why = choice.finish.message if choice.finish is not None else None
        raise ApiError(ENDED, f"the request ended before its result was complete: {why or 'aborted'}")
    return np.frombuffer(choice.prompt.readout, dtype="<f4")


def embedding_of(choice: Choice, dimensions: int | None) -> F32:
    """Return the choice's embedding, normalised to length 1. Raises ``ApiError`` as ``vector_of`` does.

    ``dimensions``: number of the first values that are kept before that; None: all. Raises ``ApiError`` 400 if the
    model has fewer.
    """
    vector = vector_of(choice)
    if dimensions is not None and dimensions > len(vector):
        raise bad_request(
            "dimensions", f"{dimensions} is above the {len(vector)} dimensions of this model's embeddings"
        )
    kept = vector[:dimensions].astype(np.float64)
    length = float(np.sqrt(kept @ kept))
    return (kept / length if length else kept).astype(np.float32)


def as_json(vector: F32) -> orjson.Fragment:
    """Return a vector as a JSON list of numbers, each as short as float32 allows."""
    return orjson.Fragment(orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY))


def as_base64(vector: F32) -> str:
    """Return a vector as base64 of its float32 bytes, as OpenAI's clients ask for it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return OpenAI's ``usage`` object of prompts without output, in tokens."""
    tokens = sum(choice.prompt_tokens or 0 for choice in choices)
    cached = sum(choice.cached_tokens or 0 for choice in choices)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}


class VectorRenderer:
    """Common base of the renderers. Their answers never stream."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "input", "input_ids": "input"}
    created = 0
    repeats = False

    def events(self, delta: Delta) -> bytes:
        """Return no bytes: there are no streams."""
        return b""

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return no bytes: there are no streams."""
        return b""
