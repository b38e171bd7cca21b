"""What a request reads from the pass over its prompt, besides the next token: an embedding, or scores of labels.

A readout is a vector of float32. ``Readout`` travels with the request to the scheduler, and ``ReadoutSpec`` with each
step to the worker. The vector comes back in ``StepResult``, ``PromptReport`` and ``PromptText``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .base import MAX_TOKENS

Pooling = Literal["mean", "last"]
"""How an embedding is made of the hidden states after the final norm: their mean, or the last token's."""
ReadoutKind = Literal["none", "mean", "last", "labels"]
MAX_LABELS = 128
"""Maximum number of labels of one request."""


class Readout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Vector that a request wants.

    - "mean": mean of the hidden states of all prompt tokens, after the final norm.
    - "last": hidden state of the last prompt token, after the final norm.
    - "labels": log-probabilities of ``labels`` as the prompt's next token, in the whole vocabulary.

    An embedding is not normalised. ``labels``: token ids. ``truncate``: whether a prompt that is too long for the
    context is cut at its end, instead of refused.
    """

    kind: ReadoutKind = "none"
    labels: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_TOKENS)], ...], Meta(max_length=MAX_LABELS)] = ()
    truncate: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether there is a vector to read."""
        return self.kind != "none"

    @property
    def needs_every_token(self) -> bool:
        """Whether the pass must compute every prompt token, so that no cached prefix can be used."""
        return self.kind == "mean"


NO_READOUT = Readout()


class ReadoutSpec(msgspec.Struct, array_like=True):
    """The part of a readout that one entry of a step contributes.

    Specs of a "mean" come with each step of a prompt. Others come only with the step that computes the prompt's end.
    """

    entry: int
    kind: ReadoutKind
    is_last: bool
    """Whether the step computes the prompt's end, so that the vector is complete."""
    labels: bytes = b""
    """Token ids (int32) of "labels"."""
