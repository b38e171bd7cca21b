"""The fields of every error that an HTTP front answers with, their usual shape, and what each status is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

ErrorShape = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes the body of an error answer from the fields that ``error_fields`` returns.

A router passes on the fields of an instance's error only if the body has them in an object ``error``, or beside the
message ``error``. Otherwise the client learns the status and the instance. If the API has types or codes of its
own, pdserve's type is there as ``kind``, and its code as ``reason``. A router goes by them. It applies the shape again
to the fields that it passes on.
"""
E = TypeVar("E", bound=BaseException)

RETRY_AFTER_SECONDS = 1
ERROR_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""Values of ``code`` for programs if the status alone decides it: OpenAI's words."""
ERROR_TYPES = {
    400: "invalid_request_error",
    403: "permission_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "overloaded_error",
    503: "overloaded_error",
    504: "timeout_error",
}


TOO_LONG, TOO_LONG_WORDS = "context_length_exceeded", "prompt is too long"
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's word for a request to keep a conversation, in an error's ``details``. Its package goes on without."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's ``type`` of errors by status. Others are invalid_request_error below 500, and api_error from there on."""
LLAMA_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "unavailable_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
"""llama-server's ``type`` of errors by status. Others are invalid_request_error below 500, else server_error."""


def without_frames(error: E) -> E:
    """Drop the frames of ``error`` and of its causes, in place, and return ``error``.

    A frame may refer back to the error by a task or a variable. Then they keep each other in memory, and with them a
    body of up to 32 MiB, until the garbage collector runs. When it runs depends on the number of objects, not on their
    size.
    """
    causes: list[BaseException | None] = [error]
    while causes:
        cause = causes.pop()
        if cause is not None:
            cause.__traceback__ = None
            causes += [cause.__cause__, cause.__context__]
    return error


def error_type(status: int) -> str:
    """Return the ``type`` of an error with this HTTP status. OpenAI's is the same for 400, 401, 404 and 405."""
    return ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_fields(
    status: int, message: str, kind: str | None = None, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the fields of an error: message, type, param, code, status. ``param`` names the offending field.

    ``kind`` becomes the type; None: the usual type and code of the status. ``status`` is needed for an error in the
    middle of a stream, which has no other status.
    """
    return {
        "message": message,
        "type": kind or error_type(status),
        "param": param,
        "code": code or ERROR_CODES.get(status),
        "status": status,
    }


def plain_error(error: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an error in OpenAI's shape, ``{"error": {…}}``. It is pdserve's own shape, too."""
    return {"error": error}


def message_error(error: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an error in Ollama's shape: ``error`` is the message, and the other fields are beside it."""
    others = {name: value for name, value in error.items() if name != "message"}
    return {"error": error["message"], **others}


def anthropic_error(error: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an error in the shape of Anthropic's API, with its word for each status as the type.

    If the prompt is too long, the message begins with the words by which clients know that.
    """
    status, message = error_status(error), error["message"]
    if error.get("code") == TOO_LONG and not message.startswith(TOO_LONG_WORDS):
        message = f"{TOO_LONG_WORDS}: {message}"
    kind = error.get("kind", error.get("type"))
    named = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    code = error.get("code")
    fields = {"param": error.get("param"), "code": code, "status": status, "kind": kind}
    if code == THREAD_UNSUPPORTED:
        fields["details"] = {"error_code": code, "unsupported": ["thread"]}
    return {"type": "error", "error": {"type": named, "message": message, **fields}}


def llama_error(error: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an error in llama-server's shape. ``code`` is the status, and ``reason`` is pdserve's code."""
    status, reason = error_status(error), error.get("reason", error.get("code"))
    named = LLAMA_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "code": status,
            "message": error["message"],
            "type": "exceed_context_size_error" if reason == TOO_LONG else named,
            "param": error.get("param"),
            "status": status,
            "kind": error.get("kind", error.get("type")),
            "reason": reason if isinstance(reason, str) else None,
        }
    }


def error_body(status: int, message: str, *, code: str | None = None) -> dict[str, Any]:
    """Make the body of an error that belongs to no path, in OpenAI's shape: ``{"error": {…}}``."""
    return plain_error(error_fields(status, message, code=code))


def error_status(error: dict[str, Any]) -> int:
    """Return the HTTP status in an ``error`` object. Other servers have it in ``code``. Return 500 if there is none."""
    for name in ("status", "code"):
        status = error.get(name)
        if isinstance(status, int) and 400 <= status <= 599:
            return status
    return 500


def error_headers(status: int, retry_after: int = 0) -> dict[str, str]:
    """Return the headers of an error: whether and when to retry (``retry_after`` seconds), or how to authenticate."""
    headers = {}
    if status == 408:
        # OpenAI's clients retry after a 408 by themselves. Here it was the client's own time limit.
        headers["x-should-retry"] = "false"
    if status in (429, 503):
        headers["Retry-After"] = str(retry_after or RETRY_AFTER_SECONDS)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
