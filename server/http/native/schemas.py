"""What ``POST /generate`` takes: SGLang's native shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from ....messages.requests import MAX_TOP_LOGPROBS
from ..bodies.fields import INT32_MAX, INTEGRAL, FieldError, OneOrMany, TokenIds
from ..bodies.request_fields import Count, RequestFields, SamplingFields, Seed
from ..bodies.unserved import ANYTHING, STRUCTURE, Unserved, neutral

GENERATE: Unserved = {
    **neutral([], names="input_embeds image_data video_data audio_data modalities token_ids_logprob session_params"),
    **neutral("", names="lora_path lora_id session_id custom_logit_processor bootstrap_pair_key multi_item_delimiter"),
    **neutral(
        False,
        names="return_hidden_states return_routed_experts return_entropy return_bytes background require_reasoning "
        "need_wait_for_image use_audio_in_video",
    ),
    **neutral(0, names="num_items_assigned"),
    # Ranks: 0 is the first one, and there is no other.
    **neutral(0, names="data_parallel_rank routed_dp_rank disagg_prefill_dp_rank"),
    **neutral(1, names="decode_tp_size"),
    **neutral(
        names="max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch "
        "positional_embed_overrides trace_context external_trace_header http_worker_ipc"
    ),
    **neutral(True, False, names="log_metrics no_logs"),
    **dict.fromkeys(("custom_labels", "conversation_id", "routing_key", "received_time", "validation_time"), ANYTHING),
}

SAMPLING_PARAMS: Unserved = {
    **STRUCTURE,
    **neutral(1, names="stream_interval"),
}


class SamplingParamsBody(SamplingFields):
    """``sampling_params`` of ``POST /generate``."""

    unserved: ClassVar[Unserved] = SAMPLING_PARAMS
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

    unserved: ClassVar[Unserved] = GENERATE
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
