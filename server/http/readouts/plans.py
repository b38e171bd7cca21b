"""Plans of requests that read a vector from their prompts and generate nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ....messages.readout import Readout
from ....messages.sampling import SamplingParams
from ..bodies.large_bodies import LARGE_BATCH
from ..engine.plan import Prompt, PromptPlan, name_requests
from ..errors import ApiError, bad_request
from ..generation.request_terms import terms_of
from ..state import HttpState
from .schemas import ReadoutBody

SAMPLING = SamplingParams(seed=0, max_new_tokens=1, temperature=0.0, ignore_eos=True)
"""The pass over the prompt ends with one greedy token, which is dropped: no decode step follows."""
MAX_INPUTS = 2048
"""Maximum number of embeddings in one answer, as in OpenAI's API."""
MAX_JOINED = 1 << 24
"""Maximum length of one request's prompts, in characters or token ids, if each of them repeats a part of the body."""


async def plan_readouts(
    state: HttpState,
    body: ReadoutBody,
    prompts: Sequence[Prompt],
    readout: Readout,
    *,
    batch: bool,
    add_special_tokens: bool | None = None,
) -> list[PromptPlan]:
    """Make a plan for each of ``prompts``, without sending anything. Raises ``ApiError`` 400.

    ``batch``: whether the client gave a list. Many plans are made while the event loop runs.
    """
    return await state.aside.run(
        len(prompts) > LARGE_BATCH,
        lambda: _plans(state, body, prompts, readout, batch=batch, add_special_tokens=add_special_tokens),
    )


def _plans(
    state: HttpState,
    body: ReadoutBody,
    prompts: Sequence[Prompt],
    readout: Readout,
    *,
    batch: bool,
    add_special_tokens: bool | None,
) -> list[PromptPlan]:
    terms = terms_of(body, state.options)
    namings = name_requests(body, [1] * len(prompts), batch, state.gate, default_key=body.cache_salt)
    return [
        PromptPlan(
            prompt=prompt,
            sampling=SAMPLING,
            n=1,
            rid=naming.rid,
            keep_output=False,
            logprobs=None,
            bootstrap=None,
            extra_key=naming.extra_key,
            add_special_tokens=add_special_tokens,
            terms=terms,
            readout=readout,
        )
        for prompt, naming in zip(prompts, namings, strict=True)
    ]


def group_of(body: ReadoutBody) -> str | None:
    """Return the name of all of a body's requests together, None if each has a name of its own."""
    return body.rid if isinstance(body.rid, str) else None


def check_inputs(field: str, count: int) -> None:
    """Raise ``ApiError`` 400 that names ``field`` if a body asks for too many embeddings."""
    if count > MAX_INPUTS:
        raise bad_request(field, f"holds {count} inputs, the limit is {MAX_INPUTS}; split the batch")


def check_joined(length: int) -> None:
    """Raise ``ApiError`` 413 if the prompts of a body have more than ``MAX_JOINED`` characters or token ids in all."""
    if length > MAX_JOINED:
        raise ApiError(
            413, f"the prompts come to {length} characters or token ids, the limit is {MAX_JOINED}; split them"
        )
