"""Framing of streams: server-sent events, and the other formats that APIs have.

Streams are written by ``server/http/generation/`` and ``router/client_answer.py``, and read by ``router/``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

DATA_PREFIX = b"data: "
EVENT_END = b"\n\n"
SSE_TYPE = "text/event-stream"
EVENT_ENDS = (b"\n\n", b"\n\r\n")
"""Both line ends that servers use. The line before the empty one may end in either, too."""
DONE_EVENT = b"data: [DONE]\n\n"
"""Last event of a stream of OpenAI's, which others use as well."""
COMMENTS = re.compile(rb"(?:(?::[^\r\n]*)?\r?\n)*+")
"""Pattern of comments and empty lines. A line matches in one way only, so the time is linear."""


class StreamFormat(NamedTuple):
    """The framing of an API's streams, and the events that they have beside their answers.

    The defaults are those of OpenAI's server-sent events. An event begins at the begin of a line.
    """

    before_error: bytes = DATA_PREFIX
    """Text of an error event before its JSON."""
    error_sign: bytes = b'data: {"error"'
    """First text of every error event, and of no other event."""
    last_event: bytes = DONE_EVENT
    """Last event of a stream, even after an error, because clients wait for it. Empty if there is none."""
    error_start: bytes = b"{"
    """Beginning of the JSON in an error event: its brace, and fields that other errors of the API do not have."""
    content_type: bytes = f"{SSE_TYPE}; charset=utf-8".encode()
    event_ends: tuple[bytes, ...] = EVENT_ENDS
    """Texts that end an event. The first one is written."""
    keep_alive: bytes = b": keep-alive\n\n"
    """Event without meaning, which is sent while nothing else is. Comments of server-sent events need not be equal to
    it."""
    progress: bytes = b": progress\n\n"
    """Event that only says that tokens come, while nothing of them can be written, as of a call until it is complete.
    """
    before_moved: bytes = b"event: moved\ndata: "
    """Text before the ticket of the event that refers a router to the instance with the rest of the answer."""
    is_default: bool = False
    """Whether an answer streams unless its body says otherwise."""

    @property
    def media_type(self) -> bytes:
        """The content type without parameters."""
        return self.content_type.partition(b";")[0]

    def end_with_error(self, body: bytes) -> bytes:
        """Return the end of a stream that fails; ``body`` is the error as JSON, an object that is not empty."""
        return self.before_error + self.error_start + body[1:] + self.event_ends[0] + self.last_event

    def moved(self, ticket: bytes) -> bytes:
        """Return the last event of a stream that goes on at another instance. ``ticket``: JSON without line ends."""
        return self.before_moved + ticket + self.event_ends[0]

    def split_moved(self, events: bytes) -> tuple[bytes, bytes | None]:
        """Return the events before the one that ``moved`` makes, and that one's ticket; None if there is none."""
        at = _find_line(events, self.before_moved)
        return (events, None) if at < 0 else (events[:at], events[at + len(self.before_moved) :].strip())

    def is_keep_alive(self, events: bytes) -> bool:
        """Return whether ``events`` have no meaning. Then the prompt still waits, and may be computed elsewhere."""
        if events.startswith(b":"):
            return b"data:" not in events and self.progress not in events
        return events.startswith(self.keep_alive) and not events.replace(self.keep_alive, b"")

    def has_error(self, events: bytes) -> bool:
        """Return whether one of ``events`` is an error."""
        return _find_line(events, self.error_sign) >= 0

    def first_error(self, events: bytes) -> bytes | None:
        """Return the JSON of an error if that is a stream's first event with a meaning; else None."""
        at = 0
        while events.startswith(self.keep_alive, at):
            at += len(self.keep_alive)
        comments = COMMENTS.match(events, at)
        at = comments.end() if comments is not None else at
        if not events.startswith(self.error_sign, at):
            return None
        return events[at + len(self.before_error) :].partition(b"\n")[0]


OPENAI_STREAM = StreamFormat()
"""Format of all streams that are not declared otherwise."""


def _find_line(events: bytes, start: bytes) -> int:
    """Return the position of the first line that begins with ``start``, -1 if there is none."""
    if events.startswith(start):
        return 0
    before = events.find(b"\n" + start)
    return before + 1 if before >= 0 else -1
