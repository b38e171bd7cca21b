"""Errors of an instance before its answer has begun. ``generation/engine_response.py`` writes those within a stream.

``runtime/web/errors.py`` has the fields, the path's API their shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from ...messages.decode import shown
from ...messages.outputs import ReqError
from ...runtime.web.access_log import CLIENT_GONE, error_shape
from ...runtime.web.errors import error_fields, error_headers, error_type
from ...runtime.web.json_response import json_response


class ClientGone(Exception):
    """The client closed its connection: there is no one to answer."""


class AnswerMoved(Exception):
    """The rest of the answer is read at another instance, by ``key``; the client can follow."""

    def __init__(self, epoch: str, host: str, port: int, key: str) -> None:
        super().__init__(f"it goes on at {host}:{port}")
        self.epoch = epoch
        self.host = host
        self.port = port
        self.key = key


class ApiError(Exception):
    """An answer other than 200. ``param`` names the offending field; the message says what to do.

    ``code`` tells programs what went wrong, in OpenAI's words if it has one for it.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, kind: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or error_type(status)
        self.code = code
        self.headers: Mapping[str, str] | None = None
        self.retry_after = 0
        """Seconds after which a retry may succeed, 0 if unknown."""

    @staticmethod
    def from_engine(error: ReqError) -> ApiError:
        """Convert the engine's error of one request; a status outside 400 to 599 becomes 500."""
        status = error.status if 400 <= error.status <= 599 else 500
        kind = error.kind if status != 500 else None
        api_error = ApiError(status, error.message, param=error.field, kind=kind, code=error.code)
        api_error.retry_after = error.retry_after
        return api_error

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return a copy for a client that calls fields differently. ``names``: engine's name of a field → the client's.

        Its ``param`` is the client's name. The message begins with that name unless it mentions the name already.
        """
        param = names.get(self.param, self.param) if self.param is not None else None
        message = f"{param}: {self.message}" if param is not None and param not in self.message else self.message
        renamed = ApiError(self.status, message, param=param, kind=self.kind, code=self.code)
        renamed.retry_after = self.retry_after
        return renamed

    def body(self, scope: Scope) -> dict[str, Any]:
        """Return the error as a JSON-ready object, in the format of the API that the path of ``scope`` belongs to."""
        return error_shape(scope)(error_fields(self.status, self.message, self.kind, self.param, self.code))

    def response(self, scope: Scope) -> Response:
        """Return the JSON response with the error, in the format of the path's API.

        It has headers for clients, such as ``Retry-After``.
        """
        headers = error_headers(self.status, self.retry_after)
        return json_response(self.body(scope), self.status, {**(self.headers or {}), **headers})


def bad_request(param: str | None, message: str) -> ApiError:
    """Make an ``ApiError`` 400 and return it, without raising it. ``param``: the offending field; None: no single one.

    The message is ``param: message``, or ``message`` alone.
    """
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def internal_error(error: Exception) -> ApiError:
    """Return the ``ApiError`` 500 for an unexpected ``error``. The caller logs its traceback."""
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log has the details")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.scope["path"])
    messages = {
        404: f"there is no {path}; docs/http-api.md lists what is",
        405: f"{path} does not take {request.method}",
    }
    api_error = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))
    api_error.headers = error.headers
    return api_error.response(request.scope)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this response, so its traceback reaches the log.
    response = internal_error(error).response(request.scope)
    # The HTTP server closes the connection then. A router must not send the next request into it.
    response.headers["connection"] = "close"
    return response


def install_error_handlers(app: Starlette) -> None:
    """Register handlers with ``app`` that answer every exception in the error format of the path's API.

    Unexpected exceptions become a 500, and their traceback reaches the log. If the client has gone, the status is 499.
    """
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
