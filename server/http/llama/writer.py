"""Writes llama-server's completions: whole answers, and the events of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ....messages.outputs import FinishReason, FinishType, NamedLogprob, Timing
from ..engine.plan import PromptPlan
from ..engine.submission import Choice, Delta
from ..generation.engine_response import event
from .schemas import LlamaBody


def settings(body: LlamaBody, plans: Sequence[PromptPlan], model: str, context_length: int) -> list[dict[str, Any]]:
    """Return ``generation_settings`` of each prompt: how the tokens of its answers are chosen.

    ``model``: name that answers report. Only the seeds differ. Thousands of biases are listed once for all prompts.
    """
    sampling = plans[0].sampling
    shared = {
        "n_predict": body.n_predict,
        "n_ctx": context_length,
        "model": model,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [[token, bias] for token, bias in sampling.logit_bias.items()],
        "n_probs": body.n_probs,
        "grammar": body.grammar,
        "stream": body.stream,
    }
    return [shared | {"seed": plan.sampling.seed} for plan in plans]


class CompletionRenderer:
    """Writes completions. ``shown``: ``generation_settings`` of each prompt. ``model``: name that answers report."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "prompt", "input_ids": "prompt", "logprobs": "n_probs"}
    created, repeats = 0, False

    def __init__(
        self, body: LlamaBody, plans: Sequence[PromptPlan], shown: Sequence[dict[str, Any]], model: str
    ) -> None:
        self._model = model
        self._max_tokens = body.max_tokens
        self._has_ids = body.return_tokens
        self._has_probabilities = body.n_probs > 0
        self._texts = [plan.prompt.text for plan in plans]
        self._settings = shown

    def answer(self, choices: list[Choice]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the object of the only choice, or a list of the objects of several."""
        answers = [
            self._finished(choice, choice.text, choice.token_ids if self._has_ids else [])
            | self._probabilities(choice.logprobs)
            for choice in choices
        ]
        return answers if len(answers) > 1 else answers[0]

    def events(self, delta: Delta) -> bytes:
        """Encode the event with what is new of a choice, if anything is, and at its end the one with all facts."""
        choice = delta.choice
        events = b""
        if delta.text or delta.token_ids:
            new = {
                "index": choice.index,
                "content": delta.text,
                "tokens": delta.token_ids,
                "stop": False,
                "tokens_predicted": choice.sent_tokens,
                "tokens_evaluated": choice.prompt_tokens or 0,
            }
            events = event(new | self._probabilities(delta.logprobs))
        return events if delta.finish is None else events + event(self._finished(choice, "", []))

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return no bytes: each choice has had its last event."""
        return b""

    def _finished(self, choice: Choice, text: str, token_ids: list[int]) -> dict[str, Any]:
        """Return the object of a finished choice with this content."""
        prompt = self._texts[choice.prompt_index]
        if prompt is None and choice.prompt is not None:
            prompt = choice.prompt.text
        is_cut = choice.finish is not None and choice.finish.type is FinishType.LENGTH
        return {
            "index": choice.index,
            "content": text,
            "tokens": token_ids,
            "stop": True,
            "model": self._model,
            "tokens_predicted": choice.completion_tokens,
            "tokens_evaluated": choice.prompt_tokens or 0,
            "generation_settings": self._settings[choice.prompt_index],
            "prompt": prompt or "",
            # Only a full context ends an answer that is shorter than it may be.
            "truncated": is_cut and choice.completion_tokens < self._max_tokens,
            **how_ended(choice.finish),
            "tokens_cached": choice.cached_tokens or 0,
            "timings": timings(choice),
        }

    def _probabilities(self, entries: Sequence[NamedLogprob]) -> dict[str, Any]:
        if not self._has_probabilities:
            return {}
        found = [
            _token(entry.token_id, entry.logprob, entry.data)
            | {"top_logprobs": [_token(*alternative) for alternative in entry.top]}
            for entry in entries
        ]
        return {"completion_probabilities": found}


def _token(token_id: int, logprob: float | None, data: bytes) -> dict[str, Any]:
    return {"id": token_id, "token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}


def how_ended(finish: FinishReason | None) -> dict[str, Any]:
    """Return how an answer ended. "limit" is llama-server's only word for one that is incomplete."""
    if finish is not None and finish.type is FinishType.STOP:
        is_word = isinstance(finish.matched, str)
        return {"stop_type": "word" if is_word else "eos", "stopping_word": finish.matched if is_word else ""}
    ended: dict[str, Any] = {"stop_type": "limit", "stopping_word": ""}
    if finish is not None and finish.type is not FinishType.LENGTH:
        ended["pdserve_finish"] = {"type": finish.type.value, "message": finish.message}
    return ended


def timings(choice: Choice) -> dict[str, Any]:
    """Return the tokens of a finished choice that were computed and generated, and how fast. Cached ones are apart."""
    spent = choice.meta.timing if choice.meta is not None else Timing()
    cached = choice.cached_tokens or 0
    return {
        "cache_n": cached,
        **_speed("prompt", max(0, (choice.prompt_tokens or 0) - cached), spent.prefill_ms),
        **_speed("predicted", choice.completion_tokens, spent.decode_ms),
    }


def _speed(name: str, tokens: int, ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / tokens, 3) if tokens else 0.0,
        f"{name}_per_second": round(tokens / ms * 1000, 3) if ms else 0.0,
    }
