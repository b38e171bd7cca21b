"""Why a server's answer did not come, or not all of it."""

from __future__ import annotations


class ClientError(Exception):
    """Base. The type says how far the request got, the message why it got no further."""


class CannotConnect(ClientError):
    """No connection: nothing was sent."""


class ConnectionGone(ClientError):
    """The server closed the connection before the answer was complete. ``untouched``: before it said anything."""

    def __init__(self, untouched: bool, cause: Exception | None = None) -> None:
        reason = f": {cause}" if cause else ""
        super().__init__(f"the server closed the connection {'before' if untouched else 'within'} the answer{reason}")
        self.untouched = untouched


class BadAnswer(ClientError):
    """What came is no HTTP/1 answer, or exceeds a limit. Its connection is closed."""


class AnswerTooLong(BadAnswer):
    """An answer that is read whole, or an event, is longer than its limit."""
