"""What ``POST /generate`` and ``POST /abort_request`` take: SGLang's native shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from . import unserved
from .errors import bad_request
from .fields import INT32_MAX, INT64_MAX, INT64_MIN, Body, OneOrMany, Rid, TokenId, TokenIds
from .unserved import Unserved

MAX_N = 64
MAX_STOPS = 32
MAX_TOP_LOGPROBS = 128

StopString = Annotated[str, Field(min_length=1, max_length=1024)]


def _check_stops(stop: str | list[str]) -> str | list[str]:
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise ValueError(f"holds {len(stop)} strings, the limit is {MAX_STOPS}")
    return stop


class SamplingFields(Body):
    """Sampling fields that the native and the OpenAI bodies share."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    # A logit over less than this may be no number any more, which looks like a broken model.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    stop: Annotated[OneOrMany[StopString], AfterValidator(_check_stops)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_top_k(self) -> SamplingFields:
        if self.top_k == 0:
            raise bad_request(self.at("top_k"), "0 tokens to choose from; give 1 or more, or -1 for all")
        return self


class SamplingParamsBody(SamplingFields):
    """``sampling_params`` of ``POST /generate``."""

    path: ClassVar[str] = "sampling_params"
    unserved: ClassVar[Unserved] = unserved.SAMPLING_PARAMS
    belongs: ClassVar[Mapping[str, str]] = {}

    max_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 128
    min_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    sampling_seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> SamplingParamsBody:
        if self.min_new_tokens > self.max_new_tokens:
            raise bad_request(
                self.at("min_new_tokens"), f"{self.min_new_tokens} is above max_new_tokens ({self.max_new_tokens})"
            )
        return self


class RequestFields(Body):
    """Fields that name a request and its hand-over; in the native and the OpenAI bodies alike.

    Lists go with a batch, one entry a prompt. ``extra_key`` keeps cached prefixes of different tenants apart.
    """

    rid: OneOrMany[Rid] | None = None
    bootstrap_host: OneOrMany[Annotated[str, Field(min_length=1, max_length=255)]] | None = None
    bootstrap_port: OneOrMany[Annotated[int, Field(ge=1, le=65535)] | None] | None = None
    bootstrap_room: OneOrMany[Annotated[int, Field(ge=0, le=INT64_MAX)]] | None = None
    extra_key: OneOrMany[Annotated[str, Field(max_length=1024)]] | None = None


class GenerateBody(RequestFields):
    """``POST /generate``: one prompt or a batch, as text or as token ids."""

    unserved: ClassVar[Unserved] = unserved.GENERATE
    belongs: ClassVar[Mapping[str, str]] = dict.fromkeys(SamplingParamsBody.model_fields, "sampling_params")

    model: str | None = None
    """Ignored: an instance serves one model. SGLang's router names one in every body that it passes on."""
    text: OneOrMany[str] | None = None
    input_ids: TokenIds | None = None
    sampling_params: OneOrMany[SamplingParamsBody] = SamplingParamsBody()
    stream: bool = False
    return_logprob: OneOrMany[bool] = False
    top_logprobs_num: OneOrMany[Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]] = 0
    logprob_start_len: OneOrMany[Annotated[int, Field(ge=-1, le=INT32_MAX)]] = -1


class AbortBody(Body):
    """``POST /abort_request``: one running request by its id, or all."""

    unserved: ClassVar[Unserved] = {"abort_message": unserved.ANYTHING}

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _check_target(self) -> AbortBody:
        if bool(self.rid) == self.abort_all:
            raise bad_request("rid", 'give either "rid" or "abort_all": true')
        return self
