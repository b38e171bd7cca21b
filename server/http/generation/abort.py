"""``POST /abort_request``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ....runtime.web.auth import NO_ADMIN_KEY
from ....runtime.web.keys import ANYBODY, Caller
from ..answers import AnswerBody, InstanceAnswer, respond
from ..bodies.fields import Body, FieldError
from ..bodies.unserved import ANYTHING, Unserved
from ..endpoint import endpoint
from ..errors import ApiError
from ..parsing import parse_body
from ..state import HttpState


class AbortBody(Body):
    """``POST /abort_request``: one running request by its id, or all."""

    unserved: ClassVar[Unserved] = {"abort_message": ANYTHING}

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _check_target(self) -> AbortBody:
        if bool(self.rid) == self.abort_all:
            raise FieldError("rid", 'give either "rid" or "abort_all": true')
        return self


class Aborted(AnswerBody):
    """``POST /abort_request``: how many were running, and how many of them were prefills' legs of requests that other
    instances answer. A router counts answers alone, and also says what each instance answered."""

    aborted: int
    legs: int = 0
    instances: list[InstanceAnswer] = Field(default=[])


@endpoint(Aborted, body=AbortBody)
async def abort_request(request: Request) -> Response:
    """End one running request, or all of them, and answer how many; the answer of each is cut short.

    A request that is not running is no error. The admin ends requests of all callers, other callers those with their
    own key. Where the server asks for no key, a caller can only end a request by its name.
    """
    engine, caller = HttpState.of(request).engine, Caller.of(request.scope)
    body = await parse_body(request, AbortBody)
    if body.abort_all and caller == ANYBODY:
        raise ApiError(401, f"abort_all: {NO_ADMIN_KEY}", param="abort_all")  # without a key nothing is one's own
    count = engine.abort_all(caller) if body.abort_all else engine.abort(body.rid, caller)
    return respond(Aborted(**count._asdict()))
