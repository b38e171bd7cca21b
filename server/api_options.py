"""Options of the HTTP API of an instance, and of its sessions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..runtime.options import opt, section
from .output_parsers.choice import ParserName


@section("API", order=15)
@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """Options of requests and answers."""

    cache_by_key: bool | None = opt(
        default=None,
        help=(
            "Separate the prefix cache by API key. Otherwise, response times and cached_tokens reveal whether "
            "another key has sent the same prefix. Default: on with several keys or an admin key; =false turns it "
            "off."
        ),
    )
    unknown_fields: Literal["warn", "refuse", "ignore"] = opt(
        default="warn",
        help=(
            "Unknown fields in a request. warn: ignore them, name them in the response header x-pdserve-ignored and "
            "once in the log. refuse: 400, with the nearest known name. ignore: ignore them silently."
        ),
    )
    grammar_backend: Literal["auto", "llguidance", "none"] = opt(
        default="auto",
        help=(
            "Library for structured output (JSON schemas, regular expressions, grammars, forced tool calls). auto: "
            "llguidance. none: requests that ask for it are refused."
        ),
    )
    sampling_defaults: Literal["model", "none"] = opt(
        default="model",
        help=(
            "Sampling parameters that a request leaves out. model: from generation_config.json, if there is one. "
            "none: the API's defaults (temperature 1, no truncation)."
        ),
    )
    incremental_streaming_output: bool = opt(
        default=False,
        help=(
            'Events of a /generate stream hold new text only, not the text so far. A request\'s "incremental" '
            "overrides this."
        ),
    )
    tool_call_parser: ParserName = opt(
        default="auto",
        help=(
            "Format of the model's tool calls in /v1/chat/completions. auto: by the chat template. none: calls are "
            "text."
        ),
    )
    reasoning_parser: ParserName = opt(
        default="auto",
        help=(
            "Format of the model's reasoning in /v1/chat/completions, which is answered as reasoning_content. auto: "
            "by the chat template. none: reasoning is part of the text."
        ),
    )
    stream_tool_arguments: bool = opt(
        default=True,
        help=(
            "Send the arguments of a tool call while the model writes them, in streams of OpenAI's and Anthropic's "
            "APIs. A call that breaks off is then sent in part. =false sends each call when it is complete."
        ),
    )
    pooling: Literal["auto", "mean", "last"] = opt(
        default="auto",
        help=(
            "How embeddings are made of the prompt's hidden states: their mean, or the last token's. auto: as the "
            "model's modules.json and its Pooling module say, else last. mean computes every prompt token; last uses "
            "the prefix cache."
        ),
    )
    metrics_aliases: Literal["none", "vllm", "sglang"] = opt(
        default="none",
        help="Additional metric names on /metrics, as the dashboards of vllm or sglang expect them.",
    )


@section("Sessions", order=65)
@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options of sessions."""

    kv_sessions_dir: str | None = opt(
        default=None,
        help=(
            "Folder for sessions, which POST /kv/snapshot writes and POST /kv/restore continues, also after a "
            "restart or at another instance with the same folder. KV goes to the third tier; without one it is "
            "recomputed. Users with write access are trusted."
        ),
    )
    kv_sessions_ttl: float = opt(
        default=168.0,
        help="Hours until a session expires. A request may ask for less.",
    )
    kv_sessions_size: float = opt(
        default=10.0,
        help="Maximum size of all sessions with their KV, in GB.",
    )
    kv_sessions_quota: float = opt(
        default=2.0, help="Maximum size of the sessions of one API key with their KV, in GB."
    )

    def problems(self) -> Iterator[str]:
        """Yield a message for each option of sessions that has an invalid value."""
        for name, value in (
            ("--kv-sessions-ttl", self.kv_sessions_ttl),
            ("--kv-sessions-size", self.kv_sessions_size),
            ("--kv-sessions-quota", self.kv_sessions_quota),
        ):
            if not (value > 0 and math.isfinite(value)):
                yield f"{name} is {value:g}: it must be above 0"
        if self.kv_sessions_dir is not None and not self.kv_sessions_dir:
            yield "--kv-sessions-dir is empty: name a folder, or leave it out"
