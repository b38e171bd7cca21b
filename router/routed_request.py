"""A client's request as the router sends it to instances."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.web.sse import OPENAI_STREAM, StreamFormat
from .facts import Facts
from .headers import Headers
from .request_body import RequestBody


@dataclass(frozen=True)
class RoutedRequest:
    """A client's request as it is sent to instances."""

    path: str
    headers: Headers
    """The headers that are passed on."""
    facts: Facts
    stream_format: StreamFormat = OPENAI_STREAM
    """Format of the answer if it is a stream."""
    is_probe: bool = False
    """Whether the body is the router's own (``/health_generate``), which is never suspected of crashing instances."""

    @property
    def body(self) -> RequestBody:
        """The client's body."""
        return self.facts.body
