"""Events of a streamed answer, put together from pieces of any length."""

from __future__ import annotations

from ..sse import EVENT_ENDS
from .errors import AnswerTooLong

MAX_EVENT_BYTES = 64 << 20
"""Longest event. The first one of a long prompt with log-probabilities has some MiB."""


class EventBuffer:
    """Buffer that cuts a stream into runs of whole events. It holds the bytes of an incomplete event.

    ``ends``: texts that end an event, of at most 3 bytes. Raises ``AnswerTooLong`` when that event exceeds ``limit``
    bytes (default ``MAX_EVENT_BYTES``).
    """

    def __init__(self, limit: int | None = None, ends: tuple[bytes, ...] = EVENT_ENDS) -> None:
        self._limit = MAX_EVENT_BYTES if limit is None else limit
        self._ends = ends
        self._part = bytearray()

    def whole(self, data: bytes) -> bytes:
        """Add ``data``. Return the whole events that it completes, or b"" if there are none.

        An incomplete event stays in the buffer. Raises ``AnswerTooLong`` if it is longer than the limit.
        """
        part = self._part
        # Nearly always true: an instance writes whole events.
        if not part and data.endswith(self._ends):
            return data
        begin = max(0, len(part) - 2)  # an end may come in two pieces; what is before it was searched already
        part += data
        end = max(at + len(mark) if (at := part.rfind(mark, begin)) >= 0 else 0 for mark in self._ends)
        whole = bytes(part[:end])
        del part[:end]
        if len(part) > self._limit:
            raise AnswerTooLong(f"an event of more than {self._limit} bytes")
        return whole

    def rest(self) -> bytes:
        """Return and drop what is left at the stream's end, an event without its end; b"" if there is none."""
        part = bytes(self._part)
        self._part.clear()
        return part
