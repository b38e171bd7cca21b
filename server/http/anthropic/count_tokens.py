"""``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ....messages.text import EncodeReq
from ....runtime.web.keys import Caller
from ..answers import respond
from ..endpoint import endpoint
from ..errors import ApiError
from ..generation.tool_use import make_reader
from ..parsing import parse_body
from ..served_model import check_model
from ..state import HttpState
from .answers import AnthropicErrorAnswer, TokenCount
from .conversation import FIELD_NAMES, read_conversation, tool_use_of
from .schemas import CountTokensBody

TIMEOUT_SECONDS = 30.0
"""Timeout of the tokenizer's answer, from when it is asked."""


@endpoint(TokenCount, body=CountTokensBody, error=AnthropicErrorAnswer)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt, as ``POST /v1/messages`` makes it of the same fields."""
    state = HttpState.of(request)
    body = await parse_body(request, CountTokensBody)
    check_model(body.model, state.model)
    # It also refuses tools that the model does not support.
    make_reader(tool_use_of(body), state.model.formats, separates_reasoning=True)
    question = EncodeReq(chat=read_conversation(body), key_name=Caller.of(request.scope).name)
    ask = lambda: state.engine.questions.ask(question, TIMEOUT_SECONDS)  # noqa: E731
    result = await state.questions.ask(request, body.characters, ask, has_chat=True)
    if result.error is not None:
        raise ApiError(400, result.error, param=result.field, code=result.code).renamed(FIELD_NAMES)
    return respond(TokenCount(input_tokens=len(result.token_ids[0])))
