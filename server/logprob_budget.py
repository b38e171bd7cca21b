"""The limit on log-probabilities of one request.

An entry is one log-probability: a token's own, or that of an alternative to it. Each takes some 20 bytes in every
message and 160 bytes in a process, and three processes pass them on. A prompt of 128k tokens with 128 alternatives each
would take gigabytes.
"""

from __future__ import annotations

import msgspec

from ..messages.requests import LogprobOptions
from ..messages.sampling import SamplingParams
from ..model_files.text.errors import PromptError

FIELD = "logprobs"
UNLIMITED = 2**31 - 1
"""``max_new_tokens`` of a request that leaves it to the context."""


def fit_logprobs(
    sampling: SamplingParams, logprobs: LogprobOptions | None, prompt_tokens: int, answers: int, limit: int
) -> SamplingParams:
    """Return ``sampling``, with fewer output tokens if the request would get too many log-probabilities.

    ``answers``: number of the request's answers. ``limit``: maximum number of log-probabilities in all of them,
    alternatives and those of the prompt included. Only a request without an output limit is shortened. Any other one
    over ``limit`` raises ``PromptError``.
    """
    if logprobs is None:
        return sampling
    each = 1 + logprobs.top_num
    scored = max(0, prompt_tokens - logprobs.start_len) if logprobs.start_len >= 0 else 0
    output = sampling.max_new_tokens
    if answers * (scored + output) * each <= limit:
        return sampling
    fitting = limit // (answers * each) - scored
    if output < UNLIMITED or fitting < 1:
        described = "1 output token" if output >= UNLIMITED else f"{output} output tokens"
        least = 1 if output >= UNLIMITED else output
        raise PromptError(
            FIELD,
            f"{answers} x ({scored} prompt tokens + {described}) x {each} log-probabilities are "
            f"{answers * (scored + least) * each}, the limit is {limit} (--max-logprobs-per-request); "
            "ask for fewer alternatives, tokens or answers, or score less of the prompt, or raise the option",
        )
    return msgspec.structs.replace(
        sampling, max_new_tokens=fitting, min_new_tokens=min(sampling.min_new_tokens, fitting)
    )
