"""What every generating body takes, whichever API it belongs to: how to sample, and what the request is called."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from ....messages.decode import shown
from ....messages.sampling import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from .fields import INT32_MAX, INT64_MAX, INT64_MIN, INTEGRAL, Body, FieldError, OneOrMany, Rid, TokenId
from .structure import StructureFields

MAX_N = 64
MAX_BIASES = 1024
MOST_SECONDS = 1e6
LEAST_TOP_P = 1e-9
"""A ``top_p`` that leaves only the most probable token."""

StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX), INTEGRAL]
Seed = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX), INTEGRAL]
"""-1 asks for another one each time."""


def _check_stops(stop: str | list[str]) -> list[str]:
    """Return the stop strings without empty ones, which stop nothing. Raises ``ValueError`` for too many."""
    strings = [string for string in ([stop] if isinstance(stop, str) else stop) if string]
    if len(strings) > MAX_STOPS:
        raise ValueError(f"holds {len(strings)} strings, the limit is {MAX_STOPS}")
    return strings


Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(ge=0, le=1), AfterValidator(lambda top_p: top_p or LEAST_TOP_P)]
"""0 leaves only the most probable token, as in OpenAI's API."""
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX), INTEGRAL]
"""-1 and 0: all."""
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_PENALTY)]
Stops = Annotated[OneOrMany[StopString], AfterValidator(_check_stops)]


class SamplingFields(StructureFields):
    """Sampling fields that the native and the OpenAI bodies share."""

    n: Annotated[int, Field(ge=1, le=MAX_N), INTEGRAL] = 1
    best_of: Annotated[int, Field(ge=1, le=INT32_MAX), INTEGRAL] | None = None
    """As many as are answered, or 1: nothing is thrown away here."""
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    min_p: MinP = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    # Tokens read the same wherever they stand here, so there is nothing to do for it.
    spaces_between_special_tokens: bool = True
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_best_of(self) -> SamplingFields:
        if self.best_of not in (None, 1, self.n):
            text = f"{self.best_of} answers of which {self.n} are given is not served; leave it out"
            if self.n < self.best_of <= MAX_N:
                text += f', or ask for all of them with "n": {self.best_of}'
            raise FieldError("best_of", text)
        return self

    @model_validator(mode="after")
    def _check_end(self) -> SamplingFields:
        if self.ignore_eos and (grammar := self.grammar()) is not None:
            raise FieldError("ignore_eos", f"can't go with {grammar.field}, which says where the output ends")
        return self

    @model_validator(mode="after")
    def _check_biases(self) -> SamplingFields:
        for token_id in self.logit_bias:
            if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= len(str(INT32_MAX))):
                raise FieldError("logit_bias", f"{shown(token_id, 20)!r} is not a token id")
        return self


class RequestFields(Body):
    """Fields that name a request and its hand-over, in the native and the OpenAI bodies alike.

    In a batch ``rid``, ``extra_key``, ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room`` may be lists. They
    then have one entry a prompt. The others are one value for the whole body, as in SGLang.

    ``bootstrap_leg`` is a router's. ``extra_key`` keeps cached prefixes of different tenants apart. ``timeout_s``:
    seconds in which the whole request has to be over. ``user``: the user that it was sent for, which counts with
    --fair-scheduling.
    """

    rid: OneOrMany[Rid] | None = None
    bootstrap_host: OneOrMany[Annotated[str, Field(min_length=1, max_length=255)]] | None = None
    bootstrap_port: OneOrMany[Annotated[int, Field(ge=1, le=65535), INTEGRAL] | None] | None = None
    bootstrap_room: OneOrMany[Annotated[int, Field(ge=0, le=INT64_MAX)]] | None = None
    bootstrap_leg: Literal["prefill", "decode"] | None = None
    extra_key: OneOrMany[Annotated[str, Field(max_length=1024)]] | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), INTEGRAL] = 0
    timeout_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] | None = None
    user: str | None = None
    _is_signed: bool = PrivateAttr(default=False)

    @property
    def is_signed(self) -> bool:
        """Return whether a router or an instance of this cluster has signed the request that these fields came in."""
        return self._is_signed

    def mark_signed(self) -> None:
        """Note that the request has a valid signature, which covers its body."""
        self._is_signed = True
