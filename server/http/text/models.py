"""``GET /v1/models``, ``POST /tokenize`` and ``POST /detokenize``: the model's names and limits, and its tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from ....messages.text import DecodeReq, EncodeReq, Limits
from ....runtime.web.keys import Caller
from ..answers import AnswerBody, respond, respond_large
from ..endpoint import endpoint
from ..errors import bad_request
from ..generation.model_name import check_model
from ..generation.tool_calls import NO_TOOLS
from ..openai.conversation import read_conversation
from ..parsing import parse_body
from ..state import HttpState
from .schemas import DetokenizeBody, TokenizeBody

TIMEOUT_SECONDS = 30.0
"""Timeout of the tokenizer's answer, from when it is asked."""


class ModelCard(AnswerBody):
    """One name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(AnswerBody):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(AnswerBody):
    """``POST /tokenize``: lists of everything for a list of texts."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: list[str] | list[list[str]] | None = None


class Text(AnswerBody):
    """``POST /detokenize``: the same text twice, or the same list."""

    prompt: str | list[str]
    text: str | list[str]


@endpoint(ModelList)
async def list_models(request: Request) -> Response:
    """List the served model by each of its names, in OpenAI's format."""
    state = HttpState.of(request)
    limits = await state.engine.questions.limits(TIMEOUT_SECONDS)
    return respond(ModelList(object="list", data=[_card(state, name, limits) for name in state.model.names]))


@endpoint(ModelCard)
async def get_model(request: Request) -> Response:
    """Answer with the card of the model that the path names, or with 404 if it is not served.

    If the name is an alias and none of the model's names, the card has the first of these.
    """
    state = HttpState.of(request)
    name = request.path_params["name"]
    check_model(name, state.model)
    limits = await state.engine.questions.limits(TIMEOUT_SECONDS)
    return respond(_card(state, name if name in state.model.names else state.model.name, limits))


@endpoint(Tokens, body=TokenizeBody)
async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text, of several, or of a conversation as the model's template renders it."""
    state = HttpState.of(request)
    body = await parse_body(request, TokenizeBody)
    check_model(body.model, state.model)
    batch = isinstance(body.prompt, list)
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt] if body.prompt is not None else None
    chat = None
    if body.messages is not None:
        args = body.chat_template_kwargs
        if body.tools and not state.model.formats.renders_tools:
            raise bad_request("tools", NO_TOOLS)
        add, continues = body.add_generation_prompt, body.continue_final_message
        chat = read_conversation(body.messages, add, continues, args, body.tools)
    special, pieces = body.add_special_tokens, body.return_token_strs
    key_name = Caller.of(request.scope).name
    question = EncodeReq(texts, chat, add_special_tokens=special, pieces=pieces, key_name=key_name)
    ask = lambda: state.engine.questions.ask(question, TIMEOUT_SECONDS)  # noqa: E731
    result = await state.questions.ask(request, body.characters, ask, has_chat=chat is not None)
    if result.error is not None:
        raise bad_request({"text": "prompt"}.get(result.field or "", result.field), result.error)
    limits = await state.engine.questions.limits(TIMEOUT_SECONDS)
    counts = [len(ids) for ids in result.token_ids]
    strings = {} if result.pieces is None else {"token_strs": result.pieces if batch else result.pieces[0]}
    return respond_large(
        Tokens,
        count=counts if batch else counts[0],
        max_model_len=limits.context_length,
        tokens=result.token_ids if batch else result.token_ids[0],
        **strings,
    )


@endpoint(Text, body=DetokenizeBody)
async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids. ``prompt`` is vLLM's name for it, ``text`` SGLang's."""
    state = HttpState.of(request)
    body = await parse_body(request, DetokenizeBody)
    check_model(body.model, state.model)
    batch = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Any = body.tokens if batch else [body.tokens]
    question = DecodeReq(lists, body.skip_special_tokens)
    work = sum(map(len, lists))
    result = await state.questions.ask(request, work, lambda: state.engine.questions.ask(question, TIMEOUT_SECONDS))
    if result.error is not None:
        raise bad_request("tokens", result.error)
    text = result.texts if batch else result.texts[0]
    return respond_large(Text, prompt=text, text=text)


def _card(state: HttpState, name: str, limits: Limits) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=state.started,
        owned_by="pdserve",
        root=state.model.path,
        parent=None,
        max_model_len=limits.context_length,
    )
