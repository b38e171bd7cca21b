"""The terms of a request: its priority, its time limit, and the user that it was sent for."""

from __future__ import annotations

import hashlib
import math
from typing import TypeVar

from starlette.requests import Request

from ...options import ServerOptions
from ..bodies.request_fields import MOST_SECONDS, RequestFields
from ..engine.plan import Terms
from ..errors import bad_request

MAX_USER = 256
"""Maximum length of a user's name that is kept as it is, in characters."""
TIMEOUT_HEADER = "x-request-timeout"
B = TypeVar("B", bound=RequestFields)


def timed(request: Request, body: B) -> B:
    """Return ``body`` with the seconds of the header ``x-request-timeout`` as its time limit, if its own is not lower.

    Raises ``ApiError`` 400 for a header that is no valid number.
    """
    header = request.headers.get(TIMEOUT_HEADER)
    if header is None:
        return body
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise bad_request(TIMEOUT_HEADER, f"must be a number of seconds above 0, up to {MOST_SECONDS:.0f}")
    return body.model_copy(update={"timeout_s": min(seconds, body.timeout_s or MOST_SECONDS)})


def terms_of(body: RequestFields, options: ServerOptions) -> Terms:
    """Return priority, time limit and user of ``body``, which hold for each of its prompts.

    Raises ``ApiError`` 400 for a priority that the server would ignore.
    """
    if body.priority and not options.uses_priorities:
        raise bad_request(
            "priority", "this server does not go by priorities; start it with --enable-priority-scheduling, or leave it"
        )
    return Terms(body.priority, body.timeout_s or 0.0, _user(body.user or ""))


def _user(name: str) -> str:
    """Return ``name``, or its hash if it is long: users only need to be told apart."""
    return name if len(name) <= MAX_USER else hashlib.sha256(name.encode()).hexdigest()
