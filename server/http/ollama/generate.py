"""``POST /api/chat`` and ``POST /api/generate``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ....runtime.web.json_response import json_response
from ..endpoint import endpoint
from ..engine.plan import Prompt
from ..errors import bad_request
from ..generation.answer_plan import AnswerFields, plan_answer
from ..generation.engine_response import EngineResponse
from ..generation.output_reader import OutputReader, PlainReader
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..generation.tool_use import ToolUse, make_reader
from ..parsing import parse_body
from ..state import HttpState
from .answers import OllamaChat, OllamaError, OllamaGenerated
from .conversation import chat_of, prompt_chat
from .names import answered_name
from .schemas import OllamaBody, OllamaChatBody, OllamaGenerateBody
from .writer import ChatParts, OllamaRenderer, Parts, PromptParts, now


@endpoint(OllamaChat, body=OllamaChatBody, event=OllamaChat, error=OllamaError)
async def chat(request: Request) -> Response:
    """Answer a conversation, in lines of JSON unless ``stream`` is false."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, OllamaChatBody)))
    name = answered_name(body.model, state.model)
    if not body.messages:
        return loaded(body, name, ChatParts())
    reader = make_reader(ToolUse(body.schemas), state.model.formats, separates_reasoning=True, has_deltas=False)
    return respond(state, body, name, Prompt(chat=chat_of(body)), reader, ChatParts())


@endpoint(OllamaGenerated, body=OllamaGenerateBody, event=OllamaGenerated, error=OllamaError)
async def generate(request: Request) -> Response:
    """Answer a prompt, in lines of JSON unless ``stream`` is false. The chat template applies unless it is ``raw``."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, OllamaGenerateBody)))
    name = answered_name(body.model, state.model)
    if not body.prompt:
        return loaded(body, name, PromptParts())
    if body.raw:
        return respond(state, body, name, Prompt(text=body.prompt), PlainReader(), PromptParts())
    reader = make_reader(ToolUse(), state.model.formats, separates_reasoning=True)
    return respond(state, body, name, Prompt(chat=prompt_chat(body)), reader, PromptParts())


def respond(
    state: HttpState, body: OllamaBody, name: str, prompt: Prompt, reader: OutputReader, parts: Parts
) -> EngineResponse:
    """Return the response that asks the engine for the answer to ``prompt``, and writes it.

    ``name``: the model's, as the answer has it. Raises ``ApiError`` 400.
    """
    if body.think and state.model.formats.reasoning is None:
        raise bad_request("think", f'"{name}" does not reason, as far as its chat template shows; leave it out')
    options = body.options
    fields = AnswerFields(options.sampling(), options.max_tokens, seed=options.seed, grammar=body.grammar())
    plan = plan_answer(state, body, prompt, fields, reader)
    return EngineResponse(state.engine, [plan], OllamaRenderer(name, plan.rid, reader, parts), stream=body.stream)


def loaded(body: OllamaBody, name: str, parts: Parts) -> Response:
    """Return the answer to a body without a prompt, by which clients load a model ahead of time.

    Raises ``ApiError`` 400 if the body has no model either.
    """
    if not body.model:
        raise bad_request("model", "is required")
    answer = {"model": name, "created_at": now(), **parts.write("", "", []), "done": True}
    return json_response({**answer, "done_reason": "load"})
