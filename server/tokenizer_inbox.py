"""What the tokenizer process does next.

A batch of thousands of prompts takes seconds, and nobody else's request is to wait for it: a long frame is put aside
and worked off in slices, between the frames that come meanwhile. These overtake it, but for aborts, which never
overtake the request that they end.
"""

from __future__ import annotations

import logging
from collections import deque

from ..messages.channel import Receiver, UndeclaredMessage
from ..messages.requests import AbortReq
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
            if len(arrived) > SLICE:
                self._aside.extend(arrived)
                continue
            for message in arrived:
                waits = self._aside and isinstance(message, AbortReq)
                (self._aside if waits else messages).append(message)
        messages += [self._aside.popleft() for _ in range(min(SLICE, len(self._aside)))]
        return messages
