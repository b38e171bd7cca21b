"""An API that no one speaks: what a file in ``server/http/`` for one more API holds.

Streams have named events, errors another shape, and no ``[DONE]`` comes at the end. ``API`` is the entry that would
stand in ``runtime/web/apis.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pdserve.messages.outputs import FinishType
from pdserve.messages.text import EncodeReq
from pdserve.runtime.web.apis import api, get, post
from pdserve.runtime.web.paths import AtRouter
from pdserve.runtime.web.sse import StreamFormat
from pdserve.server.http.answers import AnswerBody, respond
from pdserve.server.http.bodies.fields import Body
from pdserve.server.http.bodies.request_fields import RequestFields, SamplingFields
from pdserve.server.http.bodies.unserved import IGNORED, Unserved
from pdserve.server.http.endpoint import endpoint
from pdserve.server.http.engine.plan import Prompt, PromptPlan, name_requests, sampling_params
from pdserve.server.http.engine.submission import Choice, Delta
from pdserve.server.http.generation.engine_response import EngineResponse
from pdserve.server.http.generation.request_names import named
from pdserve.server.http.generation.request_terms import terms_of, timed
from pdserve.server.http.parsing import parse_body
from pdserve.server.http.state import HttpState


class SayBody(RequestFields, SamplingFields):
    """``POST /parley/say``."""

    unserved: ClassVar[Unserved] = {"mood": IGNORED}

    prompt: Annotated[str, Field(min_length=1)]
    words: Annotated[int, Field(ge=1)] = 8
    stream: bool = False


class SaidAnswer(AnswerBody):
    """A whole answer."""

    said: str
    why: Literal["done", "cut"]


class SaidEvent(AnswerBody):
    """An event ``said`` or ``over``."""

    said: str | None = None
    why: Literal["done", "cut"] | None = None


class FaultDetail(AnswerBody):
    """An error."""

    message: str
    param: str | None


class FaultAnswer(AnswerBody):
    """Any status from 400 on."""

    kind: Literal["fault"]
    error: FaultDetail


@endpoint(SaidAnswer, body=SayBody, event=SaidEvent, error=FaultAnswer)
async def say(request: Request) -> Response:
    """Answer a prompt."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, SayBody)))
    (naming,) = name_requests(body, [1], False, state.gate)
    sampling = sampling_params(body, body.words, 0, None, state.model.defaults)
    plan = PromptPlan(
        Prompt(text=body.prompt), sampling, 1, naming.rid, True, None, naming.bootstrap, naming.extra_key,
        terms=terms_of(body, state.options),
    )  # fmt: skip
    return EngineResponse(state.engine, [plan], SaidRenderer(), stream=body.stream)


class SaidRenderer:
    """Writes what was said."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "prompt"}
    created, repeats = 0, False

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return a ``SaidAnswer``."""
        return {"said": choices[0].text, "why": why(choices[0])}

    def events(self, delta: Delta) -> bytes:
        """Return one event ``said``."""
        return b"event: said\ndata: " + orjson.dumps({"said": delta.text}) + b"\n\n"

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the event ``over``."""
        return b"event: over\ndata: " + orjson.dumps({"why": why(choices[0])}) + b"\n\n"


def why(choice: Choice) -> str:
    """Return why a choice ended."""
    return "done" if choice.finish is not None and choice.finish.type is FinishType.STOP else "cut"


class CountBody(Body):
    """``POST /parley/count``."""

    prompt: str


class Count(AnswerBody):
    """The number of a prompt's tokens."""

    words: int


@endpoint(Count, body=CountBody, error=FaultAnswer)
async def count(request: Request) -> Response:
    """Count the tokens of a prompt."""
    body = await parse_body(request, CountBody)
    result = await HttpState.of(request).engine.questions.ask(EncodeReq([body.prompt]), 30.0)
    return respond(Count(words=len(result.token_ids[0])))


class Voices(AnswerBody):
    """The names of the model."""

    voices: list[str]


@endpoint(Voices, error=FaultAnswer)
async def voices(request: Request) -> Response:
    """List the names of the model."""
    return respond(Voices(voices=list(HttpState.of(request).model.names)))


def fault(error: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an error."""
    return {"kind": "fault", "error": {"message": error["message"], "param": error["param"]}}


STREAM = StreamFormat(b"event: fault\ndata: ", b"event: fault\n", b"")

API = api(
    post("/parley/say", "parley:say", "answer a prompt", AtRouter.GENERATE, rid_prefix="say-"),
    post("/parley/count", "parley:count", "count tokens", AtRouter.ASK_ONE),
    get("/parley/voices", "parley:voices", "list voices", AtRouter.ASK_ONE),
    error_shape=fault,
    stream_format=STREAM,
)
