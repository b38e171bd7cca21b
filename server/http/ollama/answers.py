"""Answers of Ollama's API, for the OpenAPI page and for tests, which check every answer against them.

The writers make answers as plain objects, for speed: no model is made while serving.
"""

from __future__ import annotations

from typing import Any, Literal

from ..answers import AnswerBody


class OllamaError(AnswerBody):
    """Any status from 400 on, and an error in the middle of a stream. ``error``: the message."""

    error: str
    type: str
    param: str | None
    code: str | None
    status: int


class OllamaFinish(AnswerBody):
    """How an answer ended where Ollama has no word for it; ``done_reason`` is "length" then."""

    type: Literal["abort", "timeout", "declined"]
    message: str


class Finished(AnswerBody):
    """The fields at the end of an answer: counts in tokens, durations in nanoseconds.

    The total is longer than the others together: a request also waits, and its text travels.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    pdserve_finish: OllamaFinish | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class AnsweredFunction(AnswerBody):
    """The call of a function. ``index``: place among the answer's calls."""

    index: int
    name: str
    arguments: dict[str, Any]


class AnsweredCall(AnswerBody):
    """A tool call of the model."""

    id: str
    function: AnsweredFunction


class AnsweredMessage(AnswerBody):
    """The assistant's message, or what is new of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class OllamaChat(Finished):
    """``POST /api/chat``: the whole answer, or a line of a stream."""

    message: AnsweredMessage


class OllamaGenerated(Finished):
    """``POST /api/generate``: the whole answer, or a line of a stream."""

    response: str
    thinking: str | None = None


class OllamaDetails(AnswerBody):
    """What the model's files say about it; a text is empty if they do not say it."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(AnswerBody):
    """One name of the model. ``digest`` changes with the model's files. ``size``: bytes of their weights."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class ListedModel(ModelEntry):
    """A name in ``GET /api/tags``."""

    modified_at: str


class ListedModels(AnswerBody):
    """``GET /api/tags``."""

    models: list[ListedModel]


class RunningModel(ModelEntry):
    """A name in ``GET /api/ps``. ``size_vram``: bytes of the weights on a GPU."""

    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(AnswerBody):
    """``GET /api/ps``; without models while the instance loads."""

    models: list[RunningModel]


Capability = Literal["completion", "tools", "thinking"]


class ShownModel(AnswerBody):
    """``POST /api/show``."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str


class VersionAnswer(AnswerBody):
    """``GET /api/version``: the version of Ollama with this API, because clients compare it, and the server's own."""

    version: str
    pdserve: str
