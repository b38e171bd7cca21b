"""The dialling end of a control connection, with a control port of its own and nothing behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.disaggregation.handover.control.port import ControlPort, Ended


class Dialled:
    """``recv`` gives what the other end says, ``ended`` why it is over."""

    def __init__(self, address: str, port: int, keys: Sequence[bytes] = ()) -> None:
        self.port = ControlPort("127.0.0.1", keys=keys)
        try:
            self.identity = self.port.dial(address, port)
        except BaseException:
            self.port.close()
            raise
        self.connection = self.port._peers[self.identity]
        self._ended: list[Ended] = []

    def recv(self) -> list[Any] | None:
        """Return the next frame's messages, or None if there is none."""
        frame = self.port.recv()
        self._ended += self.port.take_ended()
        return None if frame is None else frame[1]

    def send(self, messages) -> list[Any]:
        """Queue for the other end; returns what is too long to be sent."""
        return self.port.send(self.identity, messages)

    @property
    def ended(self) -> str | None:
        """Why the connection is over, None while it is well. As far as ``recv`` has read."""
        return self._ended[0].reason if self._ended else None

    def close(self) -> None:
        """Close everything."""
        self.port.close()
