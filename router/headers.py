"""Which headers go through the router, in either direction. Values pass as bytes: they need not be ASCII."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..runtime.web.keys import KEY_NAME_HEADER

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case."""

PASSED_ON = frozenset(
    {
        *(b"authorization", b"x-api-key", KEY_NAME_HEADER),
        *(b"x-request-id", b"x-request-timeout", b"traceparent", b"tracestate"),
    }
)
"""Of the client's, those that an instance gets to see; with an admin key, its own is not among them any more."""
WELL_FORMED = {
    b"traceparent": re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,128})?"),
    b"tracestate": re.compile(rb"[ -~\t]{0,512}"),
}
"""Headers that others read and write into their logs, by W3C's Trace Context, which has malformed ones ignored."""
MAX_VALUE_BYTES = 8192
"""Of a passed header: a longer one is dropped, as an instance has little room for a request's head."""
CONTENT_TYPE = b"content-type"
PASSED_BACK = frozenset(
    {
        CONTENT_TYPE,
        b"content-encoding",  # asked for is none; but whoever sends one all the same must be understood
        b"cache-control",
        b"x-accel-buffering",
        b"retry-after",
        b"x-should-retry",
        b"x-request-id",
        b"x-pdserve-ignored",
    }
)
"""Of an instance's, those that the client gets. The rest is about the instance's connection, or names its software."""
JSON_TYPE = (CONTENT_TYPE, b"application/json")


def passed_on(headers: Headers) -> Headers:
    """What an instance gets with a client's request: some of the client's own ``headers``, and the body's type."""
    return [JSON_TYPE, *(header for header in headers if header[0] in PASSED_ON and _is_fit(*header))]


def _is_fit(name: bytes, value: bytes) -> bool:
    form = WELL_FORMED.get(name)
    return len(value) <= MAX_VALUE_BYTES and (form is None or form.fullmatch(value) is not None)


def passed_back(headers: Headers) -> Headers:
    """What a client gets of an answer's ``headers``."""
    return [header for header in headers if header[0] in PASSED_BACK]


def without_type(headers: Headers) -> Headers:
    """``headers`` for another body than the one that they came with."""
    return [header for header in headers if header[0] not in (CONTENT_TYPE, b"content-encoding")]
