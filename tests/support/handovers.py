"""Names of hand-overs."""

from __future__ import annotations

from pdserve.messages.base import HandoverId


def named(room: int, attempt: int = 1, epoch: str = "D") -> HandoverId:
    """That of a decode called D, which tries each room once."""
    return HandoverId(epoch, room, attempt)
