"""The events of one answer that the router holds until the client has read them.

An event is held until it is whole. So an instance that dies within one leaves its client a stream that can still end
with an error. A client chooses how long events are (log-probabilities), and whether it reads them. All events of more
than ``SMALL_BYTES`` therefore share a budget. What does not fit is not held, but passed on in parts, as it arrives:

    whole() ──budget has room──▶ whole events
       └──────no room──────────▶ the begin of one, is_cut ──rest_of_event()──▶ parts … its end, not is_cut ──▶ whole()

So a client that does not read holds up its own instance and no other client. No answer has to end for want of room,
and no instance is blamed. But if an instance dies within an event that was passed on in parts, the stream can't end
with an error. It stays incomplete instead.

Bytes count from their arrival until the client's connection has taken them. They count once: while the client reads,
only the server's copy is left.
"""

from __future__ import annotations

from ..runtime.web.client.events import EventBuffer
from .byte_budget import ByteBudget

SMALL_BYTES = 64 << 10
"""Maximum bytes of events that are not counted. The memory of a stream has room for them (``MAX_BUFFERED``)."""


class HeldEvents:
    """Events of one answer to the API key ``key``, counted in ``budget``. ``ends``: texts that end an event."""

    def __init__(self, budget: ByteBudget, key: str, ends: tuple[bytes, ...]) -> None:
        self.is_cut = False
        """Whether what ``whole`` returned last ends within an event. Then ``rest_of_event`` must return the rest."""
        self.was_cut = False
        """Whether an event was passed on in parts. Then what follows it may be whole before more data arrives."""
        self._budget = budget
        self._key = key
        self._ends = ends
        self._buffer = EventBuffer(ends=ends)
        self._counted = 0
        """Bytes of this answer in the budget."""

    def whole(self, data: bytes) -> bytes:
        """Add ``data``, and return the whole events that it completes.

        Return the begin of an event, and set ``is_cut``, if it completes none and the budget has no room for them. An
        incomplete event stays here otherwise. Raises ``AnswerTooLong`` if one is longer than ``EventBuffer`` allows.
        """
        events = self._buffer.whole(data)
        if events:
            if len(events) > SMALL_BYTES:
                self._count(len(events) + self._buffer.size)
        elif (size := self._buffer.size) > SMALL_BYTES:
            if not self._budget.fits(size - self._counted, self._key):
                self.is_cut = self.was_cut = True
                events = self._buffer.cut()
            self._count(size)
        return events

    def rest_of_event(self, data: bytes) -> bytes:
        """Return what of ``data`` belongs to the event that is cut. Its end resets ``is_cut``.

        What follows the end stays here. Empty ``data`` is the end of the answer, which ends the event as well. Raises
        ``AnswerTooLong`` as ``whole`` does.
        """
        if not data:
            self.is_cut = False
            return self._ends[0]
        part, is_end = self._buffer.rest_of_event(data)
        self.is_cut = not is_end
        self._count(len(data))
        return part

    def rest(self) -> bytes:
        """Return and drop an event without its end, at the end of the answer; b"" if there is none."""
        return self._buffer.rest()

    def sent(self) -> None:
        """Note that the client's connection has taken all that was returned."""
        if self._counted:
            self._count(self._buffer.size)

    def close(self) -> None:
        """Count nothing of this answer any more."""
        self._count(0)

    def _count(self, size: int) -> None:
        counted = size if size > SMALL_BYTES else 0
        if counted != self._counted:
            self._budget.add(counted - self._counted, self._key)
            self._counted = counted
