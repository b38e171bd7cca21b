"""What ``POST /generate`` takes: SGLang's native shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from ....messages.requests import MAX_TOP_LOGPROBS
from ..bodies import unserved
from ..bodies.fields import INT32_MAX, INTEGRAL, FieldError, OneOrMany, TokenIds
from ..bodies.request_fields import Count, RequestFields, SamplingFields, Seed
from ..bodies.unserved import Unserved


class SamplingParamsBody(SamplingFields):
    """``sampling_params`` of ``POST /generate``."""

    unserved: ClassVar[Unserved] = unserved.SAMPLING_PARAMS
    belongs: ClassVar[Mapping[str, str]] = {}

    max_new_tokens: Count = 128
    min_new_tokens: Count = 0
    sampling_seed: Seed | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> SamplingParamsBody:
        if self.min_new_tokens > self.max_new_tokens:
            raise FieldError("min_new_tokens", f"{self.min_new_tokens} is above max_new_tokens ({self.max_new_tokens})")
        return self


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
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    incremental: bool | None = None
    top_logprobs_num: OneOrMany[Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), INTEGRAL]] = 0
    logprob_start_len: OneOrMany[Annotated[int, Field(ge=-1, le=INT32_MAX), INTEGRAL]] = -1
