"""The order in which the tokenizer process handles messages.

A prompt of a megabyte takes the tokenizer a large part of a second, and a batch of thousands takes longer. No other
request waits for all of that:

    arrived ──▶ handled in this turn: frames of little work, up to TURN_MESSAGES and SLICE_WORK
       └──────▶ parked: frames of much work; one slice of them a turn, in the order of their arrival

Frames that come meanwhile overtake parked ones. Messages that name a parked request do not: an abort must never
overtake the request that it ends.
"""

from __future__ import annotations

import logging
from collections import deque

from ..messages.channel import Receiver, UndeclaredMessage
from ..messages.requests import AbortReq, ChatRendered, TokenizeReq
from ..messages.routes import ToTokenizer

logger = logging.getLogger(__name__)
TURN_MESSAGES = 256
"""Maximum number of messages of short frames in one turn."""
SLICE = 32
"""Maximum number of parked messages in one turn. A frame with more messages is parked."""
SLICE_WORK = 1 << 16
"""Maximum work of one slice, and of the short frames of one turn, in characters or token ids: some 25 ms.

A larger frame is parked. A single larger prompt is a slice of its own, because a tokenizer cannot be interrupted.
"""


def work_of(message: ToTokenizer) -> int:
    """Return the characters, or token ids, that the tokenizer has to go through for ``message``."""
    if isinstance(message, TokenizeReq):
        if message.text is not None:
            return len(message.text)
        return len(message.input_ids or ())
    if isinstance(message, ChatRendered):
        return message.characters
    return 0  # conversations to be rendered and questions about text have threads of their own


class TokenizerInbox:
    """Turns of work from a channel."""

    def __init__(self, receiver: Receiver[ToTokenizer]) -> None:
        self._receiver = receiver
        self._aside: deque[ToTokenizer] = deque()
        self._rids: set[str] = set()
        """Rids of the answers of parked requests."""

    def next_turn(self) -> list[ToTokenizer]:
        """Return the messages to handle now, in this order. Waits while there is nothing to do."""
        messages: list[ToTokenizer] = []
        work = 0
        while len(messages) < TURN_MESSAGES and work < SLICE_WORK:
            try:
                arrived = self._receiver.recv(0 if messages or self._aside else -1)
            except UndeclaredMessage as e:
                logger.error("%s", e)
                continue
            if not arrived:
                break
            frame_work = sum(map(work_of, arrived))
            is_long = len(arrived) > SLICE or frame_work > SLICE_WORK
            if not is_long:
                work += frame_work
            for message in arrived:
                if isinstance(message, AbortReq) and not message.rid:
                    # It aborts all requests. Parked ones are aborted as well, each in its place.
                    self._aside.extend(AbortReq(rid, message.reason) for rid in sorted(self._rids))
                    messages.append(message)
                elif is_long or getattr(message, "rid", None) in self._rids:
                    self._set_aside(message)
                else:
                    messages.append(message)
        messages += self._next_slice()
        return messages

    def _set_aside(self, message: ToTokenizer) -> None:
        self._aside.append(message)
        if isinstance(message, TokenizeReq):
            self._rids.update(message.rids)

    def _next_slice(self) -> list[ToTokenizer]:
        """Return the first parked messages: as many as make a slice, but at least one."""
        messages: list[ToTokenizer] = []
        work = 0
        while self._aside and len(messages) < SLICE:
            more = work_of(self._aside[0])
            if messages and more and work + more > SLICE_WORK:
                break
            work += more
            message = self._aside.popleft()
            if isinstance(message, TokenizeReq):
                self._rids.difference_update(message.rids)
            messages.append(message)
        return messages
