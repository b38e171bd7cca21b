"""Events of a streamed answer, put together from pieces of any length."""

from __future__ import annotations

from ..sse import EVENT_ENDS
from .errors import AnswerTooLong

MAX_EVENT_BYTES = 64 << 20
"""Longest event. The first one of a long prompt with log-probabilities has some MiB."""


class EventBuffer:
    """Buffer that cuts a stream into runs of whole events. It holds the bytes of an incomplete event.

    An event that is too long to hold can be read in parts: ``cut`` returns its begin, ``rest_of_event`` what follows.

    ``ends``: texts that end an event, of at most 3 bytes. Raises ``AnswerTooLong`` when that event exceeds ``limit``
    bytes (default ``MAX_EVENT_BYTES``).
    """

    def __init__(self, limit: int | None = None, ends: tuple[bytes, ...] = EVENT_ENDS) -> None:
        self._limit = MAX_EVENT_BYTES if limit is None else limit
        self._ends = ends
        self._part = bytearray()
        self._searched = 0
        """Bytes of ``_part`` in which no event ends."""
        self._cut_bytes = 0
        """Bytes of the event that ``cut`` began to return, so far."""
        self._cut_tail = b""
        """Their last two."""

    @property
    def size(self) -> int:
        """Bytes of the incomplete event."""
        return len(self._part)

    def whole(self, data: bytes) -> bytes:
        """Add ``data``. Return the whole events that it completes, or b"" if there are none.

        An incomplete event stays in the buffer. Raises ``AnswerTooLong`` if it is longer than the limit.
        """
        part = self._part
        # Nearly always true: an instance writes whole events.
        if not part and data.endswith(self._ends):
            return data
        begin = max(0, self._searched - 2)  # an end may come in two pieces
        part += data
        end = max(at + len(mark) if (at := part.rfind(mark, begin)) >= 0 else 0 for mark in self._ends)
        with memoryview(part) as view:  # a slice of the part itself would be one more copy
            whole = bytes(view[:end])
        del part[:end]
        self._searched = len(part)
        if len(part) > self._limit:
            raise AnswerTooLong(f"an event of more than {self._limit} bytes")
        return whole

    def rest(self) -> bytes:
        """Return and drop what is left at the stream's end, an event without its end; b"" if there is none."""
        part = bytes(self._part)
        self._part.clear()
        self._searched = 0
        return part

    def cut(self) -> bytes:
        """Return and drop what there is of an incomplete event. Its rest must be read by ``rest_of_event``."""
        part = self.rest()
        self._cut_bytes, self._cut_tail = len(part), part[-2:]
        return part

    def rest_of_event(self, data: bytes) -> tuple[bytes, bool]:
        """Return what of ``data`` belongs to the event that was cut, and whether that is its end.

        What follows the end stays in the buffer; ``whole(b"")`` returns the whole events of it. Raises
        ``AnswerTooLong`` if the event is longer than the limit.
        """
        tail = self._cut_tail
        seen = tail + data
        ends = [at + len(mark) for mark in self._ends if (at := seen.find(mark)) >= 0]
        if ends:
            end = min(ends) - len(tail)
            self._part += data[end:]
            return data[:end], True
        self._cut_bytes += len(data)
        self._cut_tail = seen[-2:]
        if self._cut_bytes > self._limit:
            raise AnswerTooLong(f"an event of more than {self._limit} bytes")
        return data, False
