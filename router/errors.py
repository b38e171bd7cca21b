"""Errors of the router. The type decides which status a client gets, and whether a retry may help."""

from __future__ import annotations

from typing import Any

import orjson

from ..messages.error_codes import ABOUT_INSTANCE, INSTANCE_FAILED, KEY_LIMIT_EXCEEDED, OVERLOADED
from ..runtime.web.errors import error_fields, error_headers
from .headers import Headers, without_type

TOO_MANY = 429
SUCCESS = range(200, 204)
"""Statuses of an instance that go to the client with the answer. Others below 400 come without one."""


class RouterError(Exception):
    """A request can't be served."""

    status = 500
    kind = "server_error"
    code: str | None = None
    """The error's ``code`` in the answer, for programs."""
    retryable = False
    """Whether the same request may well succeed on another instance."""
    headers: Headers = ()
    """Headers of the answer, beside its content type."""
    url = ""
    """URL of the instance with the failed leg; set by the leg."""
    retry_after: float | None = None
    """Seconds for which that instance asked to get no requests."""
    is_load = False
    """Whether the instance is only overloaded, and otherwise in order."""
    is_key_limit = False
    """Whether the client's API key has all that one key may have at the instance, which has room for others.

    Such a request may succeed at another instance, since each has limits of its own.
    """
    blames_peer = False
    """Whether the other instance of the pair may be the one at fault."""
    blames_no_instance = False
    """Whether no instance that the attempt went to is at fault."""
    shows_health = False
    """Whether health checks see the cause, too."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def fields(self) -> dict[str, Any]:
        """Return the error's fields, ready for JSON. The path's API puts them into its shape."""
        return error_fields(self.status, self.message, self.kind, code=self.code)

    def all_headers(self) -> Headers:
        """Return ``headers``, and those that the API promises for this status (``Retry-After``) if they are missing."""
        given = {name for name, _ in self.headers}
        promised = [(name.lower().encode(), value.encode()) for name, value in error_headers(self.status).items()]
        return [*self.headers, *(header for header in promised if header[0] not in given)]


class BadRequestError(RouterError):
    """The request is invalid."""

    status = 400
    kind = "invalid_request_error"


class NotFoundError(RouterError):
    """The request names something that the router does not have."""

    status = 404
    kind = "invalid_request_error"


class ConflictError(RouterError):
    """The request does not fit the router's present state."""

    status = 409
    kind = "invalid_request_error"


class BodyTooLargeError(RouterError):
    """The request body is longer than the router takes."""

    status = 413
    kind = "request_too_large"


class BodyEncodedError(RouterError):
    """The request body is compressed."""

    status = 415
    kind = "invalid_request_error"


class TooManyBodiesError(RouterError):
    """The router holds as many bytes of bodies as it may, or as many bytes of large ones are arriving."""

    status = 503
    kind = "overloaded_error"
    code = OVERLOADED
    headers = ((b"retry-after", b"1"),)


class NoInstanceError(RouterError):
    """No pair and no worker can serve at the moment."""

    status = 503
    kind = "overloaded_error"
    headers = ((b"retry-after", b"1"),)


class InstanceGoneError(RouterError):
    """An instance cannot be reached, or has closed the connection."""

    status = 502
    kind = "server_error"
    retryable = True
    shows_health = True


class InstanceUnreachableError(InstanceGoneError):
    """An instance refused the connection. It was sent nothing, so a retry elsewhere is harmless."""


class InstanceCrashedError(InstanceGoneError):
    """An instance took the request, and died or hung before its answer was complete.

    The request itself may be the cause, so it is tried elsewhere only ``--retries-after-crash`` times.
    """


class InstanceRemovedError(InstanceGoneError):
    """An instance was removed from the fleet while it had the request. The request is not suspected of anything."""


class AnswerTooLongError(RouterError):
    """A whole answer, or one event, is longer than the router holds. Another instance would answer the same."""

    status = 502
    code = "answer_too_long"
    headers = ((b"x-should-retry", b"false"),)
    blames_no_instance = True


class QuarantinedError(RouterError):
    """Several instances died while they had this request. It is sent to no other one for a time."""

    status = 502
    code = "request_crashes_instances"
    headers = ((b"x-should-retry", b"false"),)
    blames_no_instance = True


class InstanceSilentError(RouterError):
    """An instance took the request and was then silent for too long. It is not retried: the wait was long enough.

    The deadline is the router's own, so this is no failure of the instance.
    """

    status = 504
    kind = "timeout_error"
    blames_no_instance = True


class SlowClientError(RouterError):
    """An instance ended an answer, or was lost, after the router had not read from it because its client did not read.

    An instance has a limit for clients that do not read, and to the instance the router is the client. So this says
    nothing about the instance. It is raised only after a part of the answer was passed on, so there is no retry.
    """

    status = 408
    kind = "timeout_error"
    code = "client_too_slow"
    blames_no_instance = True


class MovedAwayError(RouterError):
    """An instance handed the request on to another one that the router cannot reach or does not know."""

    status = 502
    retryable = True
    blames_no_instance = True


class InstanceAnsweredError(RouterError):
    """An instance answered with an error. Its own ``error`` object goes to the client.

    A status below 400, like a redirect, becomes a 502. 429, and 503 with ``code`` "overloaded", mean load. But a 429
    with ``KEY_LIMIT_EXCEEDED`` is about the client's API key. A 503 with
    ``Retry-After`` is about the instance if its ``code`` says so, or if it has none, like those of other servers.
    """

    kind = "server_error"

    def __init__(self, status: int, answer: bytes, where: str, headers: Headers) -> None:
        parsed = parse_error(answer)
        super().__init__(parsed["message"] if parsed else f"{where} answered with status {status}")
        self.status = status = status if status >= 400 else 502
        self.headers = without_type(headers)
        self.retryable = status in (TOO_MANY, 502, 503)
        error = parsed or {}
        self.kind = error.get("kind", error.get("type", self.kind))
        self.code = error.get("reason", error.get("code"))
        # Either instance of a pair may report a failure between them.
        self.blames_peer = self.kind == "transfer_error"
        self.is_key_limit = status == TOO_MANY and self.code == KEY_LIMIT_EXCEEDED
        self.is_load = (status == TOO_MANY and not self.is_key_limit) or (status == 503 and self.code == OVERLOADED)
        is_coded = isinstance(self.code, str)
        if status == 503 and not self.blames_peer and (not is_coded or self.code in ABOUT_INSTANCE):
            self.retry_after = retry_after(headers)
        self._parsed = parsed

    def fields(self) -> dict[str, Any]:
        """Return the fields of the instance's error, or new ones made by the router if they could not be parsed."""
        return super().fields() if self._parsed is None else {"status": self.status, **self._parsed}


def error_of(status: int, body: bytes, where: str, headers: Headers) -> InstanceAnsweredError | InstanceCrashedError:
    """Make the error for an instance's error response: ``InstanceCrashedError`` if one of its processes died.

    ``where`` names the instance in messages. ``headers`` are those of the response.
    """
    answered = InstanceAnsweredError(status, body, where, headers)
    if status == 503 and answered.code == INSTANCE_FAILED:
        return InstanceCrashedError(f"{where}: {answered.message}")
    return answered


def retry_after(headers: Headers) -> float | None:
    """Return the seconds of a ``Retry-After`` header. None if it is missing or has a date; pdserve sends no dates."""
    value = next((value for name, value in headers if name == b"retry-after"), b"")
    return float(value) if value.isdigit() and len(value) < 10 else None


def parse_error(answer: bytes) -> dict[str, Any] | None:
    """Return the fields of an error in the shape of its API, None for anything else.

    They are in the object ``error``, or beside it if ``error`` is the message. Lists and objects in it are left out. No
    API has them there, and a deeply nested one could not be passed on.
    """
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, str):
        error = {**parsed, "message": error}
        del error["error"]
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    return {name: value for name, value in error.items() if not isinstance(value, dict | list)}
