"""Fields that clients of SGLang, vLLM and OpenAI send and this server does not serve.

There are three kinds:
- *Refused unless neutral*: a field that would change the answer. It is accepted with the values declared here, which
  ask for nothing, so that a client that spells out its defaults works. Any other value is refused by name. Only the
  declared values are neutral, not every falsy one.
- *Tolerated*: a field that never changes an answer is accepted with any value (``ANYTHING``).
- *Ignored*: a field that other servers act on without changing the answer. It is accepted, and named in the answer's
  header and once in the log (``field_names.py``).

``null`` means "not given" everywhere. docs/http-api.md has a table of them, which ``docs/generate_fields.py`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ANYTHING: Final = (object(),)
"""Neutral values of a field that never changes an answer, such as a label for its sender."""
IGNORED: Final = (object(),)
"""Neutral values of a field without effect here although clients may expect one: the response names it as ignored."""

Unserved = Mapping[str, tuple[Any, ...]]


def _neutral(*values: Any, names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), values)


_STRUCTURE: Unserved = {
    **_neutral("", names="regex ebnf json_schema structural_tag"),
    **_neutral("", [], names="stop_regex"),
    **_neutral(False, names="no_stop_trim"),
    **_neutral({}, names="custom_params"),
    **_neutral(0, names="thinking_budget"),
}

GENERATE: Unserved = {
    **_neutral([], names="input_embeds image_data video_data audio_data modalities token_ids_logprob session_params"),
    **_neutral("", names="lora_path lora_id session_id custom_logit_processor bootstrap_pair_key multi_item_delimiter"),
    **_neutral(
        False,
        names="return_hidden_states return_routed_experts return_entropy return_bytes background require_reasoning "
        "need_wait_for_image use_audio_in_video",
    ),
    **_neutral(0, names="num_items_assigned"),
    # Ranks: 0 is the first one, and there is no other.
    **_neutral(0, names="data_parallel_rank routed_dp_rank disagg_prefill_dp_rank"),
    **_neutral(1, names="decode_tp_size"),
    **_neutral(
        names="max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch "
        "positional_embed_overrides trace_context external_trace_header http_worker_ipc"
    ),
    **_neutral(True, False, names="log_metrics no_logs"),
    **dict.fromkeys(("custom_labels", "conversation_id", "routing_key", "received_time", "validation_time"), ANYTHING),
}

SAMPLING_PARAMS: Unserved = {
    **_STRUCTURE,
    **_neutral(1, names="stream_interval"),
}

_OPENAI_COMMON: Unserved = {
    **_STRUCTURE,
    **_neutral(
        False,
        names="include_stop_str_in_output use_beam_search early_stopping return_hidden_states return_routed_experts "
        "return_cached_tokens_details return_meta_info",
    ),
    **_neutral([], names="allowed_token_ids bad_words logits_processors"),
    **_neutral({}, names="structured_outputs guided_json kv_transfer_params vllm_xargs session_params"),
    **_neutral("", names="guided_regex guided_grammar guided_decoding_backend guided_whitespace_pattern"),
    **_neutral("", names="custom_logit_processor lora_path"),
    **_neutral([], names="guided_choice"),
    **_neutral(names="truncate_prompt_tokens prompt_logprobs data_parallel_rank thinking_token_budget"),
    **_neutral(1, names="length_penalty stream_interval"),
    **_neutral({"type": "text"}, names="response_format"),
    **dict.fromkeys(("metadata", "safety_identifier", "request_id"), ANYTHING),
    **dict.fromkeys(("service_tier", "store", "prompt_cache_key", "prompt_cache_retention"), IGNORED),
}

COMPLETION: Unserved = {**_OPENAI_COMMON, **_neutral("", names="suffix"), **_neutral(names="prompt_embeds")}

CHAT: Unserved = {
    **_OPENAI_COMMON,
    **_neutral([], names="tools functions documents"),
    **_neutral({}, names="audio web_search_options reasoning mm_processor_kwargs"),
    **_neutral("", names="chat_template"),
    **_neutral(False, names="echo"),
    **_neutral("none", "auto", names="tool_choice function_call"),
    **_neutral(["text"], names="modalities"),
    # Hints: how long the answer should be, and how soon it should come.
    **dict.fromkeys(("verbosity", "prediction"), IGNORED),
    **dict.fromkeys(("parallel_tool_calls", "separate_reasoning", "stream_reasoning", "include_reasoning"), ANYTHING),
}

CHAT_MESSAGE: Unserved = {
    **_neutral([], names="tool_calls annotations"),
    **_neutral("", names="tool_call_id refusal reasoning"),
    **_neutral({}, names="function_call audio"),
    # lm-eval sends this in each message, as if it were a part of one.
    "type": ("text", "message"),
    "id": ANYTHING,
    "status": ANYTHING,
    "cache_control": IGNORED,
}

TEXT_PART: Unserved = {**_neutral([], names="annotations"), "cache_control": IGNORED}

START_PROFILE: Unserved = {
    **_neutral(False, names="profile_by_stage merge_profiles"),
    **_neutral([], names="profile_stages"),
    **_neutral("", names="profile_prefix"),
    **_neutral(names="start_step"),
}

STREAM_OPTIONS: Unserved = {"include_obfuscation": ANYTHING, "chunk_include_usage": (False,)}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a field's value asks for nothing. ``False`` is not 0, and ``True`` is not 1."""
    if value is None or neutral is ANYTHING or neutral is IGNORED:
        return True
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)
