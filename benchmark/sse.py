"""Cuts a stream of bytes into the payloads of its server-sent events."""

from __future__ import annotations

PREFIX = b"data: "


class EventSplitter:
    """Feed bytes in, get the ``data`` of complete events out. Comments and other fields are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take ``data``, and return the payloads of the events that it completes. An incomplete event is kept."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            # JSON writes its own line ends as \n or \r escapes: a raw one can only be the stream's.
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    if event.startswith(PREFIX) and b"\n" not in event:
        return event[len(PREFIX) :]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
