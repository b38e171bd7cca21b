"""Why a request is not taken in."""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.options import ServerOptions
from .kv_memory import KVMemory

BAD_REQUEST, BUSY = "invalid_request_error", "overloaded_error"


class Refusal(NamedTuple):
    """As ``ReqError`` has it."""

    status: int
    message: str
    kind: str
    field: str | None = None
    code: str | None = None


def refuse_prompt(prompt_len: int, memory: KVMemory) -> Refusal | None:
    """Where it can never have the memory that it needs."""
    limit = memory.max_total_tokens
    # One slot for the token that follows the prompt; whole pages only.
    if memory.pages_up(prompt_len + 1) <= limit:
        return None
    text = f"the prompt has {prompt_len} tokens, the KV pool holds {limit}; shorten it or raise --max-total-tokens"
    return Refusal(400, text, BAD_REQUEST, "input_ids", "context_length_exceeded")


def refuse_more(count: int, options: ServerOptions) -> Refusal | None:
    """Where ``count`` requests are all that are taken in at a time."""
    if count < options.max_queued_requests + options.max_running_requests:
        return None
    text = f"{count} requests are queued or running; try again later"
    return Refusal(429, text, BUSY, code="rate_limit_exceeded")
