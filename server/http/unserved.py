"""Fields that clients of SGLang, vLLM and OpenAI send and this server does not serve.

Each is accepted while it asks for nothing (null, false, 0, "", [], {} or one of the values listed), so that a client
that spells out its defaults works, and otherwise refused by name: nothing that would change the answer is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ANYTHING: Final = (object(),)
"""Neutral values of a field that never changes an answer, such as the name of the end user."""

Unserved = Mapping[str, tuple[Any, ...]]


def _nothing_neutral(*names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names, ())


GENERATE: Unserved = {
    **_nothing_neutral(
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "modalities",
        "lora_path",
        "lora_id",
        "session_id",
        "session_params",
        "custom_logit_processor",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "return_hidden_states",
        "return_routed_experts",
        "return_entropy",
        "return_bytes",
        "return_prompt_token_ids",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "decode_tp_size",
        "bootstrap_pair_key",
        "positional_embed_overrides",
        "need_wait_for_image",
        "num_items_assigned",
        "multi_item_delimiter",
        "background",
        "priority",
        "require_reasoning",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "image_max_dynamic_patch",
        "video_max_dynamic_patch",
        "use_audio_in_video",
        "trace_context",
        "external_trace_header",
        "http_worker_ipc",
    ),
    "log_metrics": (True,),
    "no_logs": ANYTHING,
    "custom_labels": ANYTHING,
    "conversation_id": ANYTHING,
    "routing_key": ANYTHING,
    "received_time": ANYTHING,
    "validation_time": ANYTHING,
}

SAMPLING_PARAMS: Unserved = {
    **_nothing_neutral(
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "stop_regex",
        "no_stop_trim",
        "custom_params",
        "logit_bias",
        "thinking_budget",
    ),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "best_of": (1,),
}

_OPENAI_COMMON: Unserved = {
    **_nothing_neutral(
        "logit_bias",
        "store",
        "regex",
        "ebnf",
        "json_schema",
        "structural_tag",
        "stop_regex",
        "no_stop_trim",
        "include_stop_str_in_output",
        "use_beam_search",
        "early_stopping",
        "truncate_prompt_tokens",
        "allowed_token_ids",
        "bad_words",
        "prompt_logprobs",
        "return_token_ids",
        "return_hidden_states",
        "return_routed_experts",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "logits_processors",
        "custom_logit_processor",
        "custom_params",
        "lora_path",
        "session_params",
        "data_parallel_rank",
        "kv_transfer_params",
        "vllm_xargs",
        "cache_salt",
        "prompt_cache_key",
        "prompt_cache_retention",
        "priority",
        "thinking_budget",
        "thinking_token_budget",
        "return_cached_tokens_details",
        "return_meta_info",
    ),
    "user": ANYTHING,
    "metadata": ANYTHING,
    "safety_identifier": ANYTHING,
    "request_id": ANYTHING,
    "service_tier": ("auto", "default"),
    "length_penalty": (1,),
    "best_of": (1,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (True,),
    "stream_interval": (1,),
    "response_format": ({"type": "text"},),
}

COMPLETION: Unserved = {
    **_OPENAI_COMMON,
    **_nothing_neutral("suffix", "prompt_embeds"),
    "add_special_tokens": (True,),
}

CHAT: Unserved = {
    **_OPENAI_COMMON,
    **_nothing_neutral(
        "tools",
        "functions",
        "audio",
        "prediction",
        "web_search_options",
        "reasoning",
        "reasoning_effort",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "add_special_tokens",
        "documents",
        "mm_processor_kwargs",
        "echo",
    ),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": ANYTHING,
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "add_generation_prompt": (True,),
    "separate_reasoning": ANYTHING,
    "stream_reasoning": ANYTHING,
    "include_reasoning": ANYTHING,
}

CHAT_MESSAGE: Unserved = _nothing_neutral(
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "annotations",
    "audio",
    "reasoning",
    "reasoning_content",
)

STREAM_OPTIONS: Unserved = {"include_obfuscation": ANYTHING, "chunk_include_usage": ()}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a field's value asks for nothing."""
    return neutral is ANYTHING or not value or value in neutral
