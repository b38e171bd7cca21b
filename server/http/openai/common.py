"""Code that the OpenAI endpoints share: the model's name, usage and finish reasons."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....messages.grammar import Grammar
from ....messages.outputs import FinishReason, FinishType
from ....messages.requests import LogprobOptions
from ....messages.sampling import OutputMarks
from ....runtime.web.moved_answer import Ticket
from ..engine.plan import Prompt, PromptPlan, name_requests, sampling_params
from ..engine.repeated import check_repeated
from ..engine.submission import Choice
from ..generation.engine_response import event
from ..generation.request_terms import terms_of
from ..generation.timing import timing_of
from ..served_model import ServedModel
from ..state import HttpState
from .logprobs import LogprobsWriter
from .schemas import OpenAIBody

FINISH_REASONS = {
    FinishType.STOP: "stop",
    FinishType.LENGTH: "length",
    # The answer is incomplete, and "length" is OpenAI's only word that says so.
    FinishType.ABORT: "length",
    FinishType.TIMEOUT: "length",
    FinishType.DECLINED: "length",
}
"""OpenAI's word for each finish. Clients in languages with enums refuse an answer with any other ``finish_reason``."""


def plan_openai(
    body: OpenAIBody,
    prompts: Sequence[Prompt],
    batch: bool,
    max_tokens: int,
    logprobs: LogprobOptions | None,
    state: HttpState,
    *,
    echo: bool = False,
    marks: OutputMarks | None = None,
    grammar: Grammar | None = None,
) -> list[PromptPlan]:
    """Make a ``PromptPlan`` for each of ``prompts``, without sending anything. Raises ``ApiError`` (400, 413).

    ``batch``: whether the client gave a list. ``max_tokens``: limit of each answer; 0 asks for no output. ``echo``: the
    answer repeats the prompt. ``marks``: what the detokenizer needs to know of the answer's format. ``grammar``: what
    the output must match, in place of the body's own.
    """
    counts = [body.n] * len(prompts)
    defaults, terms = state.model.defaults, terms_of(body, state.options)
    namings = name_requests(body, counts, batch, state.gate, default_key=body.cache_salt)
    plans = [
        PromptPlan(
            prompt=prompt,
            # If the client gives no seed, each prompt draws its own.
            sampling=sampling_params(body, max_tokens, body.min_tokens, body.seed, defaults, marks, grammar),
            n=body.n,
            rid=naming.rid,
            keep_output=max_tokens > 0,
            logprobs=logprobs,
            bootstrap=naming.bootstrap,
            extra_key=naming.extra_key,
            add_special_tokens=body.add_special_tokens,
            return_prompt=body.return_token_ids or (echo and prompt.text is None),
            terms=terms,
        )
        for prompt, naming in zip(prompts, namings, strict=True)
    ]
    check_repeated(plans, with_text=echo)
    return plans


@dataclass(frozen=True)
class Envelope:
    """The fields around the choices of an answer or chunk, and optional fields of its choices and chunks."""

    id: str
    model: str
    include_usage: bool
    continuous_usage: bool
    token_ids: bool
    created: int

    @staticmethod
    def of(body: OpenAIBody, plans: Sequence[PromptPlan], model: ServedModel, ticket: Ticket | None = None) -> Envelope:
        """Make the envelope of one request.

        Its id is the client's ``rid`` or, without a single one, that of the first prompt. ``ticket``: of an answer that
        began at another instance; it keeps the creation time from there.
        """
        stream_options = body.stream_options
        return Envelope(
            id=body.rid if isinstance(body.rid, str) else plans[0].rid,
            model=model.name,
            include_usage=stream_options is not None and stream_options.include_usage,
            continuous_usage=stream_options is not None and stream_options.continuous_usage_stats,
            token_ids=body.return_token_ids,
            created=ticket.created if ticket is not None else int(time.time()),
        )

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an object of type ``kind``, such as ``chat.completion``: the envelope's fields and ``choices``."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def ids(self, token_ids: list[int]) -> dict[str, Any]:
        """Return ``token_ids`` as a field of a choice if it was asked for, else no field."""
        return {"token_ids": token_ids} if self.token_ids else {}

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the token ids of a choice's prompt as a field; no field if unwanted, or before they have come."""
        if not self.token_ids or choice.prompt is None:
            return {}
        return {"prompt_token_ids": choice.prompt.token_ids}

    def chunk(self, kind: str, choice: Choice, fields: dict[str, Any], around: dict[str, Any] | None = None) -> bytes:
        """Encode a chunk of object type ``kind`` as an event. It has one choice, of these ``fields``.

        ``around``: more fields beside the list of choices. Usage so far is included if the client asked for it.
        """
        content = {**self.wrap(kind, [{"index": choice.index, **fields}]), **(around or {})}
        if self.continuous_usage:
            content["usage"] = usage([choice])
        elif self.include_usage:
            content["usage"] = None
        return event(content)

    def usage_chunk(self, kind: str, choices: list[Choice]) -> bytes:
        """Encode the event with the usage and timing of the whole answer.

        Return no bytes if the client did not ask for it.
        """
        if not self.include_usage:
            return b""
        return event({**self.wrap(kind, []), "usage": usage(choices), **timing_of(choices)})


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return OpenAI's ``usage`` object for ``choices``, in tokens. A prompt with several choices counts once."""
    first_of_prompt = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(choice.prompt_tokens or 0 for choice in first_of_prompt)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens or 0 for choice in first_of_prompt)},
        **_completion_details(choices),
    }


def _completion_details(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the field with the number of reasoning tokens in all ``choices``, or no field without reasoning."""
    reports = [choice.reasoning for choice in choices if choice.reasoning is not None]
    if not reports:
        return {}
    return {"completion_tokens_details": {"reasoning_tokens": sum(report.tokens for report in reports)}}


def ending(finish: FinishReason | None, *, has_calls: bool = False) -> dict[str, Any]:
    """Return how a choice ended, as fields of the choice. ``finish``: None if it has not ended yet.

    ``has_calls``: whether the model has called a tool.

    - ``finish_reason`` is one of OpenAI's words, or null.
    - ``matched_stop`` is SGLang's: the token id or string that matched.
    - ``pdserve_finish`` is there if OpenAI has no word for the end: the true ``type``, and a ``message``.
    """
    if finish is None:
        return {"finish_reason": None}
    reason = "tool_calls" if has_calls and finish.type is FinishType.STOP else FINISH_REASONS[finish.type]
    fields: dict[str, Any] = {"finish_reason": reason, "matched_stop": finish.matched}
    if reason == "tool_calls":
        return fields
    if finish.type.value != fields["finish_reason"]:
        fields["pdserve_finish"] = {"type": finish.type.value, "message": finish.message}
    return fields


class EnvelopeRenderer:
    """Common base of the renderers of OpenAI's answers. ``logprobs``: writes the choices' ``logprobs``."""

    def __init__(self, envelope: Envelope, logprobs: LogprobsWriter) -> None:
        self._envelope = envelope
        self._logprobs = logprobs.write

    @property
    def created(self) -> int:
        """Return the creation time that the answer reports, a Unix time in whole seconds."""
        return self._envelope.created

    @property
    def repeats(self) -> bool:
        """Return False: each event holds only what is new."""
        return False
