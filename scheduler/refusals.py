"""Reasons for which a request is not admitted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ..messages import error_codes
from ..messages.error_codes import RATE_LIMIT_EXCEEDED
from ..messages.requests import Bootstrap, GenerateReq
from .kv_memory import KVMemory
from .options import SchedulerOptions

MOST_SECONDS = 120
"""Maximum of ``Retry-After``, in seconds: a client that is told to wait longer does not come back."""
BAD_REQUEST, BUSY = "invalid_request_error", "overloaded_error"


class Refusal(NamedTuple):
    """Reason why a request is not admitted, with the fields of ``ReqError``."""

    status: int
    message: str
    kind: str
    field: str | None = None
    code: str | None = None
    retry_after: int = 0


DRAINING = Refusal(503, "the instance is draining; send the request to another one", BUSY, code=error_codes.DRAINING)
NO_EXCHANGE = Refusal(
    400,
    "bootstrap_room was given, but this instance exchanges no KV; "
    "use a prefill and a decode instance, or --handover on",
    BAD_REQUEST,
    "bootstrap_room",
)


def refuse_prompt(prompt_len: int, memory: KVMemory) -> Refusal | None:
    """Return a 400 refusal if the KV pool can never hold the prompt and one more token; None if it can."""
    limit = memory.pool.max_total_tokens
    # One slot for the token that follows the prompt; whole pages only.
    if memory.pool.pages_up(prompt_len + 1) <= limit:
        return None
    text = f"the prompt has {prompt_len} tokens, the KV pool holds {limit}; shorten it or raise --max-total-tokens"
    return Refusal(400, text, BAD_REQUEST, "input_ids", "context_length_exceeded")


def refuse_grammar(msg: GenerateReq, device: str) -> Refusal | None:
    """Return a 400 refusal if the request has a grammar and ``device`` is not a CPU; None otherwise."""
    grammar = msg.sampling.grammar
    if grammar is None or device == "cpu":
        return None
    text = f"structured output is served on CPUs only so far; this instance computes on {device}"
    return Refusal(400, text, BAD_REQUEST, grammar.field)


def refuse_readout(msg: GenerateReq, vocab_size: int) -> Refusal | None:
    """Return a 400 refusal if a label is no token of the model's, or if a hand-over is asked for; None otherwise."""
    readout = msg.readout
    if any(label >= vocab_size for label in readout.labels):
        text = f"label {max(readout.labels)} is not in the model's vocabulary of {vocab_size} tokens"
        return Refusal(400, text, BAD_REQUEST, "label_token_ids")
    if readout.is_wanted and msg.bootstrap is not None:
        return Refusal(400, "the instance that computes the prompt answers", BAD_REQUEST, "bootstrap_host")
    return None


def most_living(options: SchedulerOptions) -> int:
    """Return how many requests may run and wait at a time."""
    return options.max_queued_requests + options.max_running_requests


def refuse_more(
    living: int,
    options: SchedulerOptions,
    seconds: Callable[[], float],
    place: int = 0,
    code: str = RATE_LIMIT_EXCEEDED,
) -> Refusal | None:
    """Return a refusal if ``living`` requests are as many as may run and wait; None if one more may.

    It is a 429 with ``Retry-After``, or a 413 for a batch that never fits. ``seconds`` returns the estimated time until
    half of the waiting requests are admitted. ``place``: how many prompts of its batch come before this one.
    ``code``: error code of a 429.
    """
    if living < most_living(options):
        return None
    # Half the queue, not the first free position: all requests refused meanwhile would come back for that one.
    again = max(1, min(math.ceil(seconds()), MOST_SECONDS))
    text = f"{living} requests are queued or running; try again in {again} s"
    if place >= most_living(options):
        return refuse_batch(place + 1, most_living(options))
    return Refusal(429, text, BUSY, code=code, retry_after=again)


def refuse_batch(answers: int, most: int) -> Refusal:
    """Return the 413 refusal of a batch of at least ``answers`` answers, of which at most ``most`` ever fit."""
    text = f"the batch asks for {answers} answers or more, and {most} may be queued or running at a time; split it"
    return Refusal(413, text, "request_too_large", code=error_codes.BATCH_TOO_LARGE)


def refuse_rid(rid: str) -> Refusal:
    """Return the 400 refusal of a request with the rid of a running one."""
    return Refusal(400, f"rid {rid!r} is in use by a running request; choose another", BAD_REQUEST, "rid")


def refuse_peer(where: Bootstrap) -> Refusal:
    """Return the 403 refusal of a request with a bootstrap address that must not be asked; ``where`` has the reason."""
    return Refusal(403, f"bootstrap_host {where.host}: {where.refusal}", "permission_error", "bootstrap_host")
