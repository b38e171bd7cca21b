"""What the tokenizer process does next.

A batch of thousands of prompts takes seconds, and nobody else's request is to wait for it: a long frame is put aside
and worked off in slices, between the frames that come meanwhile. These overtake it, but for aborts of what is put
aside, as an abort must never overtake the request that it ends.
"""

from __future__ import annotations

import logging
from collections import deque

from ..messages.channel import Receiver, UndeclaredMessage
from ..messages.requests import AbortReq, TokenizeReq
from ..messages.routes import ToTokenizer

logger = logging.getLogger(__name__)
MAX_BATCH = 256
"""Messages of short frames that are taken together."""
SLICE = 32
"""Messages of a long frame that are taken at a time, and the length from which on a frame is long."""


class TokenizerInbox:
    """Turns of work from a channel."""

    def __init__(self, receiver: Receiver[ToTokenizer]) -> None:
        self._receiver = receiver
        self._aside: deque[ToTokenizer] = deque()
        self._rids: set[str] = set()
        """Of the requests that are put aside."""

    def next_turn(self) -> list[ToTokenizer]:
        """Messages to handle now, in this order; waits where there is nothing to do."""
        messages: list[ToTokenizer] = []
        while len(messages) < MAX_BATCH:
            try:
                arrived = self._receiver.recv(0 if messages or self._aside else -1)
            except UndeclaredMessage as e:
                logger.error("%s", e)
                continue
            if not arrived:
                break
            is_long = len(arrived) > SLICE
            for message in arrived:
                if isinstance(message, AbortReq) and not message.rid:
                    # All: those put aside end too, each when its turn comes.
                    self._aside.extend(AbortReq(rid, message.reason) for rid in sorted(self._rids))
                    messages.append(message)
                elif is_long or (isinstance(message, AbortReq) and message.rid in self._rids):
                    self._put_aside(message)
                else:
                    messages.append(message)
        for _ in range(min(SLICE, len(self._aside))):
            message = self._aside.popleft()
            if isinstance(message, TokenizeReq):
                self._rids.discard(message.rid)
            messages.append(message)
        return messages

    def _put_aside(self, message: ToTokenizer) -> None:
        self._aside.append(message)
        if isinstance(message, TokenizeReq):
            self._rids.add(message.rid)
