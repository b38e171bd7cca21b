"""Plans the one answer to a conversation or a prompt, for APIs without several answers to a request."""

from __future__ import annotations

from typing import NamedTuple

from ....messages.grammar import Grammar
from ..bodies.fields import INT32_MAX
from ..bodies.request_fields import RequestFields, SamplingFields
from ..engine.plan import Prompt, PromptPlan, name_requests, sampling_params
from ..state import HttpState
from .output_reader import OutputReader
from .request_terms import terms_of


class AnswerFields(NamedTuple):
    """What a body says about its answer, in no API's words."""

    sampling: SamplingFields
    max_tokens: int | None
    """Maximum number of tokens to generate; 0 asks for none, None for the rest of the context."""
    min_tokens: int = 0
    seed: int | None = None
    grammar: Grammar | None = None
    """What the output must match, in place of the grammar of ``sampling``."""
    cache_key: str | None = None
    """Namespace of cached prefixes, if the body has no ``extra_key``."""


def plan_answer(
    state: HttpState, body: RequestFields, prompt: Prompt, fields: AnswerFields, reader: OutputReader
) -> PromptPlan:
    """Make the plan of the one answer to ``prompt``, without sending anything. Raises ``ApiError`` 400.

    ``body``: what the request is called, and its terms. ``reader``: reads the answer.
    """
    (naming,) = name_requests(body, [1], False, state.gate, default_key=fields.cache_key)
    # Without a limit the answer ends with the context: the engine lowers the number to what fits.
    max_tokens = INT32_MAX if fields.max_tokens is None else fields.max_tokens
    return PromptPlan(
        prompt=prompt,
        sampling=sampling_params(
            fields.sampling,
            max_tokens,
            fields.min_tokens,
            fields.seed,
            state.model.defaults,
            reader.marks,
            fields.grammar,
        ),
        n=1,
        rid=naming.rid,
        keep_output=max_tokens > 0,
        logprobs=None,
        bootstrap=naming.bootstrap,
        extra_key=naming.extra_key,
        terms=terms_of(body, state.options),
    )
