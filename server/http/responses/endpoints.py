"""``POST /v1/responses``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....runtime.web.body import TooManyValues
from ....runtime.web.responses.keeper import ResponseKeeper, refused
from ....runtime.web.responses.request import RequestRefused, ResponseRequest
from ..bodies.fields import INT32_MAX
from ..endpoint import endpoint
from ..engine.plan import Prompt, PromptPlan, name_requests, sampling_params
from ..errors import ApiError, bad_request
from ..generation.request_names import named
from ..generation.request_terms import terms_of, timed
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
    try:
        asked = await state.responses.read(request.scope, await read_bytes(request), MAX_BODY_BYTES)
        await state.uploads.check(asked.body)
    except RequestRefused as e:
        return refused(request.scope, e)
    except TooManyValues as e:
        raise ApiError(413, str(e)) from None
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
    reader = make_reader(use, formats, separates_reasoning=True)
    grammar = forced_call(use, formats)
    (naming,) = name_requests(body, [1], False, state.gate, default_key=body.cache_salt)
    plan = PromptPlan(
        prompt=Prompt(chat=read_conversation(body)),
        sampling=sampling_params(
            body,
            # Without a limit the answer ends with the context: the engine lowers the number to what fits.
            INT32_MAX if body.max_output_tokens is None else body.max_output_tokens,
            body.min_tokens,
            body.seed,
            state.model.defaults,
            reader.marks,
            grammar,
        ),
        n=1,
        rid=naming.rid,
        keep_output=True,
        logprobs=None,
        bootstrap=naming.bootstrap,
        extra_key=naming.extra_key,
        terms=terms_of(body, state.options),
    )
    ticket = ticket_of(request.scope)
    fields = echo(body, plan, state.model.name, ticket.created if ticket is not None else int(time.time()))
    writer = ResponseWriter(fields, body, reader, ticket)
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
