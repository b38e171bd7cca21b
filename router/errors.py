"""What can go wrong on the way through the router: the type says which status a client sees, and if a retry helps."""

from __future__ import annotations

from typing import Any

import orjson

from ..messages.error_codes import ABOUT_INSTANCE, INSTANCE_FAILED, OVERLOADED
from ..runtime.web.errors import error_body, error_headers
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
    """URL of the instance whose leg failed; set by the leg."""
    retry_after: float | None = None
    """Seconds for which that instance asked to be left alone."""
    is_load = False
    """Whether it only says that the instance has too much to do: nothing is wrong with it."""
    blames_peer = False
    """Whether the other instance of the pair may be the one at fault."""
    blames_nobody = False
    """Whether no instance that the attempt went to is at fault."""
    shows_health = False
    """Whether health checks see the cause, too."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def content(self) -> dict[str, Any]:
        """The answer's body, JSON-ready: ``{"error": {"message", "type", "param", "code", "status"}}``."""
        return error_body(self.status, self.message, self.kind, code=self.code)

    def all_headers(self) -> Headers:
        """``headers``, and those that the API promises for this status where they are missing."""
        given = {name for name, _ in self.headers}
        promised = [(name.lower().encode(), value.encode()) for name, value in error_headers(self.status).items()]
        return [*self.headers, *(header for header in promised if header[0] not in given)]


class BadRequestError(RouterError):
    """The client must send something else."""

    status = 400
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
    """The router holds as much of requests' bodies as it may, or as much of large ones is arriving."""

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
    """An instance is not there, or not any more."""

    status = 502
    kind = "server_error"
    retryable = True
    shows_health = True


class InstanceUnreachableError(InstanceGoneError):
    """An instance refused the connection: it was sent nothing, so trying elsewhere can do no harm."""


class InstanceCrashedError(InstanceGoneError):
    """An instance took the request, and died or hung before its answer was complete.

    The request itself may be the cause, so it is tried elsewhere only ``--retries-after-crash`` times.
    """


class AnswerTooLongError(RouterError):
    """A whole answer is longer than the router holds. Another instance would answer the same."""

    status = 502
    code = "answer_too_long"
    headers = ((b"x-should-retry", b"false"),)
    blames_nobody = True


class QuarantinedError(RouterError):
    """Instances died again and again while they had this request: it is sent to no other one for a while."""

    status = 502
    code = "request_crashes_instances"
    headers = ((b"x-should-retry", b"false"),)
    blames_nobody = True


class InstanceSilentError(RouterError):
    """An instance took the request and then said nothing for too long. Not tried again: the wait was long enough.

    The deadline is the router's own, so it says nothing against the instance.
    """

    status = 504
    kind = "timeout_error"
    blames_nobody = True


class MovedAwayError(RouterError):
    """An instance handed the request on to one that can't be followed to."""

    status = 502
    retryable = True
    blames_nobody = True


class InstanceAnsweredError(RouterError):
    """An instance answered with an error; its own ``error`` object goes to the client.

    A status below 400 (a redirect, say) is no answer to any request of a client's: it becomes a 502.
    429, and 503 with ``code`` "overloaded", tell of load. A 503 with ``Retry-After`` is about the instance if its
    ``code`` says so, or if it has none, as other servers'.
    """

    kind = "server_error"

    def __init__(self, status: int, answer: bytes, where: str, headers: Headers) -> None:
        parsed = parse_error(answer)
        super().__init__(parsed["message"] if parsed else f"{where} answered with status {status}")
        self.status = status = status if status >= 400 else 502
        self.headers = without_type(headers)
        self.retryable = status in (TOO_MANY, 502, 503)
        said = parsed or {}
        self.kind, self.code = said.get("type", self.kind), said.get("code")
        # What failed between two instances, either may tell.
        self.blames_peer = said.get("type") == "transfer_error"
        self.is_load = status == TOO_MANY or (status == 503 and self.code == OVERLOADED)
        is_coded = isinstance(self.code, str)
        if status == 503 and not self.blames_peer and (not is_coded or self.code in ABOUT_INSTANCE):
            self.retry_after = retry_after(headers)
        self._said = parsed

    def content(self) -> dict[str, Any]:
        """The instance's own words when they are in the API's error shape, ours otherwise."""
        return super().content() if self._said is None else {"error": {"status": self.status, **self._said}}


def error_of(status: int, said: bytes, where: str, headers: Headers) -> InstanceAnsweredError | InstanceCrashedError:
    """Return the error for an instance's error response: ``InstanceCrashedError`` if one of its processes died."""
    answered = InstanceAnsweredError(status, said, where, headers)
    if status == 503 and answered.code == INSTANCE_FAILED:
        return InstanceCrashedError(f"{where}: {answered.message}")
    return answered


def retry_after(headers: Headers) -> float | None:
    """Seconds; None where the header is not there, or says a date, which no instance of ours does."""
    value = next((value for name, value in headers if name == b"retry-after"), b"")
    return float(value) if value.isdigit() and len(value) < 10 else None


def parse_error(answer: bytes) -> dict[str, Any] | None:
    """The ``error`` object of an answer in the API's error shape, None for anything else.

    Lists and objects in it are left out: no API has them there, and one nested too deeply could not be passed on.
    """
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    return {name: value for name, value in error.items() if not isinstance(value, dict | list)}
