"""What can go wrong on the way through the router: the type says which status a client sees, and if a retry helps."""

from __future__ import annotations

from typing import Any

import orjson

from ..runtime.web.errors import error_body
from .headers import Headers, without_type


class RouterError(Exception):
    """A request can't be served. ``retryable``: the same request may well succeed on another instance.

    ``headers``: what goes with the answer, beside its content type. ``url``: of the instance whose leg failed.
    ``retry_after``: seconds for which that one wants to be left alone. ``blames_peer``: its peer may be the one at
    fault. ``blames_nobody``: none of those that the attempt went to. ``shows_health``: health checks see the cause,
    too.
    """

    status = 500
    kind = "server_error"
    retryable = False
    headers: Headers = ()
    url = ""
    retry_after: float | None = None
    blames_peer = False
    blames_nobody = False
    shows_health = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def body(self) -> bytes:
        """The answer's body, JSON."""
        return orjson.dumps(error_body(self.status, self.message, self.kind))


class BadRequestError(RouterError):
    """The client must send something else."""

    status = 400
    kind = "invalid_request_error"


class BodyTooLargeError(RouterError):
    """The request body is longer than the router takes."""

    status = 413
    kind = "request_too_large"


class TooManyUploadsError(RouterError):
    """More of large bodies is arriving at once than the router holds."""

    status = 503
    kind = "overloaded_error"
    headers = ((b"retry-after", b"1"),)


class NoInstanceError(RouterError):
    """No pair and no worker can serve at the moment."""

    status = 503
    kind = "overloaded_error"
    headers = ((b"retry-after", b"1"),)


class InstanceGoneError(RouterError):
    """An instance refused the connection, or dropped it before its answer was complete."""

    status = 502
    kind = "server_error"
    retryable = True
    shows_health = True


class InstanceSilentError(RouterError):
    """An instance took the request and then said nothing for too long. Not tried again: the wait was long enough.

    A decode has nothing to say while its prefill computes.
    """

    status = 504
    kind = "timeout_error"
    blames_peer = True


class MovedAwayError(RouterError):
    """An instance handed the request on to one that can't be followed to."""

    status = 502
    retryable = True
    blames_nobody = True


class InstanceAnsweredError(RouterError):
    """An instance answered with an error; its own body goes to the client."""

    kind = "server_error"

    def __init__(self, status: int, answer: bytes, where: str, headers: Headers) -> None:
        parsed = parse_error(answer)
        super().__init__(str(parsed["message"]) if parsed else f"{where} answered with status {status}")
        self.status = status
        self.headers = without_type(headers)
        self.retryable = status in (429, 502, 503)
        # What failed between two instances, either may tell.
        self.blames_peer = parsed is not None and parsed.get("type") == "transfer_error"
        if status in (429, 503) and not self.blames_peer:
            self.retry_after = retry_after(headers)
        self._answer = answer if parsed else None

    def body(self) -> bytes:
        """The instance's own words when they are in the API's error shape, ours otherwise."""
        return self._answer if self._answer is not None else super().body()


def retry_after(headers: Headers) -> float | None:
    """Seconds; None where the header is not there, or says a date, which no instance of ours does."""
    value = next((value for name, value in headers if name == b"retry-after"), b"")
    return float(value) if value.isdigit() and len(value) < 10 else None


def parse_error(answer: bytes) -> dict[str, Any] | None:
    """The ``error`` object of an answer in the API's error shape, None for anything else."""
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return error if isinstance(error, dict) and "message" in error else None
