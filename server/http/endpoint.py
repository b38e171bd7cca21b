"""An endpoint of an instance: its handler, beside the models of its body and its answers.

``runtime/web/apis.py`` declares the endpoint's path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from .answers import ErrorAnswer
from .bodies.fields import Body

Handler = Callable[[Request], Awaitable[Response]]


class QueryParameter(NamedTuple):
    """A query parameter of a path."""

    name: str
    values: tuple[str, ...] = ()
    """Values that it can have; empty: any."""
    required: bool = False


class HttpEndpoint(NamedTuple):
    """A handler and the models of what it reads and answers. The OpenAPI page shows them."""

    handler: Handler
    answer: type[BaseModel] | None
    """Answer with status 200. None for an endpoint that the OpenAPI page leaves out."""
    body: type[Body] | None
    event: type[BaseModel] | None
    """One event of a streamed answer, if the body can ask for a stream."""
    query: Sequence[QueryParameter]
    error: type[BaseModel]
    """Answer with any other status. Its shape is declared with the path."""


def endpoint(
    answer: type[BaseModel] | None = None,
    *,
    body: type[Body] | None = None,
    event: type[BaseModel] | None = None,
    query: Sequence[QueryParameter] = (),
    error: type[BaseModel] = ErrorAnswer,
) -> Callable[[Handler], HttpEndpoint]:
    """Return a decorator that makes an ``HttpEndpoint`` of a handler.

    Models only describe what the handler reads and writes. ``answer``: model of the answer with status 200. None hides
    the endpoint from the OpenAPI page. ``body``: model of the request's body, None if it has none. ``event``: one event
    of a streamed answer. ``error``: answers with other statuses.
    """

    def decorate(handler: Handler) -> HttpEndpoint:
        return HttpEndpoint(handler, answer, body, event, query, error)

    return decorate
