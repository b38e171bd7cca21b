"""What the OpenAI endpoints share: the model's name, usage, finish reasons, logprobs' token names."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...messages.outputs import TokenLogprob
from ...messages.requests import LogprobOptions
from ...runtime.options import ServerOptions
from .engine_response import event
from .errors import ApiError
from .openai_schemas import OpenAIBody
from .plan import Prompt, PromptPlan, name_requests, sampling_params
from .submission import Choice

DEFAULT_MODEL = "default"


def check_model(asked: str | None, options: ServerOptions) -> None:
    """Raise ``ApiError`` 404 where a client asks for a model that is not the one served; "default" always is."""
    if asked not in (None, DEFAULT_MODEL, options.model_name, options.model_path):
        raise ApiError(404, f'model: "{asked}" is not served here; "{options.model_name}" is', param="model")


def plan_openai(
    body: OpenAIBody,
    prompts: Sequence[Prompt],
    batch: bool,
    max_tokens: int,
    logprobs: LogprobOptions | None,
    default_port: int,
    id_prefix: str,
) -> list[PromptPlan]:
    """What the engine is asked; raises ``ApiError``."""
    counts = [body.n] * len(prompts)
    namings = name_requests(body, counts, batch, lambda: id_prefix + secrets.token_hex(16), default_port)
    sampling = sampling_params(body, max_tokens, body.min_tokens, body.seed)
    return [
        PromptPlan(
            prompt=prompt,
            # Without a seed of the client's each prompt draws its own.
            sampling=sampling if body.seed is not None else sampling_params(body, max_tokens, body.min_tokens, None),
            n=body.n,
            rid=naming.rid,
            keep_output=max_tokens > 0,
            logprobs=logprobs,
            bootstrap=naming.bootstrap,
            extra_key=naming.extra_key,
        )
        for prompt, naming in zip(prompts, namings, strict=True)
    ]


@dataclass(frozen=True)
class Envelope:
    """The fields around the choices of an answer or chunk, and whether chunks carry usage."""

    id: str
    model: str
    include_usage: bool
    continuous_usage: bool
    created: int

    @staticmethod
    def of(body: OpenAIBody, plans: Sequence[PromptPlan], options: ServerOptions) -> Envelope:
        """The envelope of one request; a batch goes by the client's rid or the first prompt's."""
        stream_options = body.stream_options
        return Envelope(
            id=body.rid if isinstance(body.rid, str) else plans[0].rid,
            model=options.model_name,
            include_usage=stream_options is not None and stream_options.include_usage,
            continuous_usage=stream_options is not None and stream_options.continuous_usage_stats,
            created=int(time.time()),
        )

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """``choices`` in an object of type ``kind``."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def chunk(self, kind: str, choice: Choice, fields: dict[str, Any]) -> bytes:
        """The event of one choice's chunk."""
        content = self.wrap(kind, [{"index": choice.index, **fields}])
        if self.continuous_usage:
            content["usage"] = usage([choice])
        elif self.include_usage:
            content["usage"] = None
        return event(content)

    def usage_chunk(self, kind: str, choices: list[Choice]) -> bytes:
        """The event with the usage of the whole answer, where it was asked for."""
        if not self.include_usage:
            return b""
        return event({**self.wrap(kind, []), "usage": usage(choices)})


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts of ``choices``; a prompt with several choices counts once."""
    first_of_prompt = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(choice.prompt_tokens or 0 for choice in first_of_prompt)
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens or 0 for choice in first_of_prompt)},
    }


def ending(choice: Choice) -> dict[str, Any]:
    """``finish_reason``, and, once there is one, SGLang's ``matched_stop`` (the token id or string that matched)."""
    if choice.finish is None:
        return {"finish_reason": None}
    return {"finish_reason": choice.finish.type.value, "matched_stop": choice.finish.matched}


def token_name(token_id: int) -> str:
    """A token in logprobs. This process has no tokenizer, and texts of tokens may be equal where their ids are not."""
    return f"token_id:{token_id}"


def top_with_own(entry: TokenLogprob) -> list[tuple[int, float]]:
    """The alternatives of a position, its own token among them; empty for a prompt's first token."""
    if entry.logprob is None:
        return []
    own = (entry.token_id, entry.logprob)
    return entry.top if any(token_id == entry.token_id for token_id, _ in entry.top) else [*entry.top, own]
