"""Plans of requests that read a vector from their prompts and generate nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ....messages.readout import Readout
from ....messages.sampling import SamplingParams
from ..engine.plan import Prompt, PromptPlan, name_requests
from ..generation.request_terms import terms_of
from ..state import HttpState
from .schemas import ReadoutBody

SAMPLING = SamplingParams(seed=0, max_new_tokens=1, temperature=0.0, ignore_eos=True)
"""The pass over the prompt ends with one greedy token, which is dropped: no decode step follows."""


def plan_readouts(
    state: HttpState,
    body: ReadoutBody,
    prompts: Sequence[Prompt],
    readout: Readout,
    *,
    batch: bool,
    add_special_tokens: bool | None = None,
) -> list[PromptPlan]:
    """Make a plan for each of ``prompts``, without sending anything. Raises ``ApiError`` 400.

    ``batch``: whether the client gave a list.
    """
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
