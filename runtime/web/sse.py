"""Framing of server-sent events. Streams are written by ``server/http/generation/`` and ``router/client_answer.py``."""

from __future__ import annotations

import re
from typing import NamedTuple

DATA_PREFIX = b"data: "
EVENT_END = b"\n\n"
DONE_EVENT = b"data: [DONE]\n\n"
"""Last event of a stream of OpenAI's, which others use as well."""
COMMENTS = re.compile(rb"(?:(?::[^\r\n]*)?\r?\n)*+")
"""Pattern of comments and empty lines. A line matches in one way only, so the time is linear."""


class StreamFormat(NamedTuple):
    """The events that an API's streams have beside their answers. Comments keep the streams of all APIs alive."""

    before_error: bytes = DATA_PREFIX
    """Text of an error event before its JSON."""
    error_sign: bytes = b'data: {"error"'
    """First text of every error event, and of no other. In JSON strings its quotes or line ends are escaped."""
    last_event: bytes = DONE_EVENT
    """Last event of a stream, even after an error, because clients wait for it. Empty if there is none."""
    error_start: bytes = b"{"
    """Beginning of the JSON in an error event: its brace, and fields that other errors of the API do not have."""

    def end_with_error(self, body: bytes) -> bytes:
        """Return the end of a stream that fails; ``body`` is the error as JSON, an object that is not empty."""
        return self.before_error + self.error_start + body[1:] + EVENT_END + self.last_event

    def first_error(self, events: bytes) -> bytes | None:
        """Return the JSON of an error if that is a stream's first event, after comments; else None."""
        comments = COMMENTS.match(events)
        at = comments.end() if comments is not None else 0
        if not events.startswith(self.error_sign, at):
            return None
        return events[at + len(self.before_error) :].partition(b"\n")[0]
