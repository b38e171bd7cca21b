"""Names requests without a ``rid`` after their HTTP request, so that one id finds them everywhere."""

from __future__ import annotations

import secrets
from typing import TypeVar

from starlette.requests import Request

from ....runtime.web.access_log import AccessRecord
from ....runtime.web.keys import Caller
from ..bodies.request_fields import RequestFields
from ..state import HttpState
from .tickets import ticket_of

B = TypeVar("B", bound=RequestFields)


def named(request: Request, body: B, *, is_kept: bool = False) -> B:
    """Return ``body`` with a ``rid``: its own, else that of a moved answer's ticket, else the HTTP request's id.

    That id is the path's prefix and ``x-request-id``. A retry may use it again while it is in use: then eight digits
    are appended. ``is_kept``: the name outlives the request, so they are always appended to an id that the client gave.
    A ``rid`` of the body is not checked here. Submit before anything is awaited, or the name may be taken meanwhile.
    """
    if body.rid is not None:
        return body
    ticket = ticket_of(request.scope)
    if ticket is not None:
        return body.model_copy(update={"rid": ticket.rid})
    record = AccessRecord.of(request.scope)
    rid = record.rid_prefix + record.request_id
    is_reused = is_kept and record.has_own_id
    if is_reused or HttpState.of(request).engine.live.is_named(rid, Caller.of(request.scope)):
        rid = f"{rid}-{secrets.token_hex(4)}"
    return body.model_copy(update={"rid": rid})
