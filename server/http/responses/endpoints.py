"""``POST /v1/responses``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....messages.error_codes import OVERLOADED
from ....runtime.web.body import TooManyValues, UploadDropped
from ....runtime.web.responses.keeper import ResponseKeeper, refused
from ....runtime.web.responses.request import RequestRefused, ResponseRequest
from ..bodies.tool_fields import MAX_TOOL_CALLS
from ..endpoint import endpoint
from ..engine.plan import Prompt
from ..errors import ApiError, bad_request
from ..generation.answer_plan import AnswerFields, plan_answer
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..generation.tickets import ticket_of
from ..generation.tool_use import ToolUse, forced_call, make_reader
from ..parsing import MAX_BODY_BYTES, parse_bytes, read_bytes
from ..served_model import check_model
from ..state import HttpState
from .answers import ResponseAnswer, ResponseEvent
from .conversation import read_conversation
from .schemas import ForcedFunction, ResponsesBody
from .writer import ResponsesAnswer, ResponseWriter, echo


@endpoint(ResponseAnswer, body=ResponsesBody, event=ResponseEvent)
async def create_response(request: Request) -> Response:
    """Answer a conversation of items, plain or streaming with typed events."""
    state = HttpState.of(request)
    raw = await read_bytes(request)
    try:
        with state.uploads.wait(len(raw)):
            asked = await state.responses.read(request.scope, raw, MAX_BODY_BYTES)
        del raw
        await state.uploads.check(asked.body)
    except RequestRefused as e:
        return refused(request.scope, e)
    except TooManyValues as e:
        raise ApiError(413, str(e)) from None
    except UploadDropped as e:
        raise ApiError(503, str(e), code=OVERLOADED) from None
    answer = await answer_to(request, await parse_bytes(request, ResponsesBody, asked.body))
    return KeptAnswer(state.responses, asked._replace(body=b""), answer)


async def answer_to(request: Request, body: ResponsesBody) -> Response:
    """Return the answer to a checked body. Its input has all of the conversation."""
    state = HttpState.of(request)
    body = named(request, timed(request, body), is_kept=True)
    if body.previous_response_id is not None and not body.kept_elsewhere:
        raise bad_request(
            "previous_response_id", "no response is kept for this router's requests; send the conversation in input"
        )
    check_model(body.model, state.model)
    use, formats = tool_use_of(body), state.model.formats
    reader = make_reader(use, formats, separates_reasoning=True, most_calls=MAX_TOOL_CALLS)
    grammar = forced_call(use, formats)
    fields = AnswerFields(body, body.max_output_tokens, body.min_tokens, body.seed, grammar, body.cache_salt)
    plan = plan_answer(state, body, Prompt(chat=read_conversation(body)), fields, reader)
    ticket = ticket_of(request.scope)
    echoed = echo(body, plan, state.model.name, ticket.created if ticket is not None else int(time.time()))
    writer = ResponseWriter(echoed, body, reader, ticket)
    return ResponsesAnswer(state.engine, plan, writer, stream=body.stream)


def tool_use_of(body: ResponsesBody) -> ToolUse:
    """Return what ``body`` says about tools. With the ``tool_choice`` "none" there are none."""
    choice = body.tool_choice
    if choice == "none":
        return ToolUse()
    schemas = {tool.name or "": tool.parameters or {} for tool in body.functions}
    only = choice.name if isinstance(choice, ForcedFunction) else None
    return ToolUse(schemas, choice != "auto", only, body.parallel_tool_calls)


class KeptAnswer(Response):
    """Sends ``answer``, and keeps the response in it if ``asked`` says so."""

    def __init__(self, keeper: ResponseKeeper, asked: ResponseRequest, answer: Response) -> None:
        # Response.__init__ would render a body.
        self.status_code = 200
        self.background = None
        self._keeper = keeper
        self._asked = asked
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._keeper.answer(self._asked, self._answer, scope, receive, send)
