"""Options of the HTTP API of an instance, and of its sessions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..runtime.options import opt, section


@section("API", order=15)
@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """Options of requests and answers."""

    cache_by_key: bool | None = opt(
        default=None,
        help=(
            "Keep the cached prefixes of each key apart: how soon an answer begins, and how many of its tokens were "
            "cached, then tells nothing of others' prompts. Default: where there are several keys, or an admin key; "
            "=false for never."
        ),
    )
    unknown_fields: Literal["warn", "refuse", "ignore"] = opt(
        default="warn",
        help=(
            "What becomes of a request's fields that no API here knows: warn (ignored, named in the header "
            "x-pdserve-ignored of the answer and once in the log), refuse (400, with the nearest name that exists), "
            "ignore (silently)."
        ),
    )
    sampling_defaults: Literal["model", "none"] = opt(
        default="model",
        help=(
            "Where sampling parameters come from that a request leaves out: model (its generation_config.json, "
            "where there is one), none (the API's own: temperature 1, nothing cut off)."
        ),
    )
    incremental_streaming_output: bool = opt(
        default=False,
        help=(
            'Events of a /generate stream hold what is new, not everything so far; a request\'s "incremental" says '
            "otherwise."
        ),
    )
    metrics_aliases: Literal["none", "vllm", "sglang"] = opt(
        default="none",
        help="Names that /metrics shows beside pdserve's own: those that the dashboards of vllm or sglang ask for.",
    )


@section("Sessions", order=65)
@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options of sessions."""

    kv_sessions_dir: str | None = opt(
        default=None,
        help=(
            "A folder in which POST /kv/snapshot writes requests down, that go on after a restart or at another "
            "instance that has it, too. Their KV goes to the third tier; without one it is computed again. Who may "
            "write there is trusted."
        ),
    )
    kv_sessions_ttl: float = opt(
        default=168.0,
        help="Hours after which a session is gone, and its KV may go from the store. A request may ask for less.",
    )
    kv_sessions_size: float = opt(
        default=10.0,
        help="Most GB that all sessions take together, with the KV that is kept for them.",
    )
    kv_sessions_quota: float = opt(default=2.0, help="The same of the sessions of one API key.")

    def problems(self) -> Iterator[str]:
        """Yield a complaint for each wrong option."""
        for name, value in (
            ("--kv-sessions-ttl", self.kv_sessions_ttl),
            ("--kv-sessions-size", self.kv_sessions_size),
            ("--kv-sessions-quota", self.kv_sessions_quota),
        ):
            if not (value > 0 and math.isfinite(value)):
                yield f"{name} is {value:g}: it must be above 0"
        if self.kv_sessions_dir is not None and not self.kv_sessions_dir:
            yield "--kv-sessions-dir is empty: name a folder, or leave it out"
