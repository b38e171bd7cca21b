"""The headers that go through the router, in either direction. Values pass as bytes: they need not be ASCII."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..runtime.web.keys import KEY_NAME_HEADER

Headers = Sequence[tuple[bytes, bytes]]
"""Pairs of name and value; names are in lower case."""

PASSED_ON = frozenset(
    {
        *(b"authorization", b"x-api-key", KEY_NAME_HEADER),
        *(b"x-request-id", b"x-request-timeout", b"traceparent", b"tracestate"),
    }
)
"""Request headers that are forwarded from the client to the instance."""
WELL_FORMED = {
    b"traceparent": re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,128})?"),
    b"tracestate": re.compile(rb"[ -~\t]{0,512}"),
}
"""Syntax of the W3C Trace Context headers. Malformed ones are dropped, as the specification demands."""
MAX_VALUE_BYTES = 8192
"""Longest value of a forwarded header. Longer ones are dropped: an instance limits the size of a request's head."""
CONTENT_LENGTH = b"content-length"
CONTENT_TYPE = b"content-type"
PASSED_BACK = frozenset(
    {
        CONTENT_TYPE,
        b"content-encoding",  # none is asked for, but a client must understand an answer that has one
        b"cache-control",
        b"x-accel-buffering",
        b"retry-after",
        b"x-should-retry",
        b"x-request-id",
        b"x-pdserve-ignored",
    }
)
"""Response headers forwarded from the instance to the client. The others describe the instance's connection."""
JSON_TYPE = (CONTENT_TYPE, b"application/json")


def passed_on(headers: Headers) -> Headers:
    """Return the headers that an instance gets: some of the client's own ``headers``, and the body's type.

    Only the last one of each name is passed on. An instance refuses a head with too many headers, and closes the
    connection.
    """
    last = {header[0]: header for header in headers if header[0] in PASSED_ON and _is_fit(*header)}
    return [JSON_TYPE, *last.values()]


def _is_fit(name: bytes, value: bytes) -> bool:
    form = WELL_FORMED.get(name)
    return len(value) <= MAX_VALUE_BYTES and (form is None or form.fullmatch(value) is not None)


def passed_back(headers: Headers) -> Headers:
    """Return the part of an answer's ``headers`` that the client gets."""
    return [header for header in headers if header[0] in PASSED_BACK]


def without_type(headers: Headers) -> Headers:
    """Return ``headers`` without those that describe the body that they came with."""
    return [header for header in headers if header[0] not in (CONTENT_TYPE, b"content-encoding")]
