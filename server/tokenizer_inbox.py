"""The order in which the tokenizer process handles messages.

A prompt of a megabyte takes the tokenizer a large part of a second, and a batch of thousands takes longer. No other
request waits for all of that:

    arrived ──▶ handled in this tick: frames of little work, up to TICK_MESSAGES and SLICE_WORK
       └──────▶ parked: frames of much work; one slice of them a tick, in the order of their arrival
                  └── all answers of a request are aborted: ended here, and its prompt is dropped

Frames that come meanwhile overtake parked ones. Messages that name a parked request do not: an abort must never
overtake the request that it ends.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from ..messages.base import Message
from ..messages.channel import Receiver, UndeclaredMessage
from ..messages.outputs import InstanceRole
from ..messages.requests import AbortReq, ChatRendered, TokenizeReq
from ..messages.routes import ToTokenizer
from .aborted_request import end_of_aborted

logger = logging.getLogger(__name__)
TICK_MESSAGES = 256
"""Maximum number of messages of short frames in one tick."""
SLICE = 32
"""Maximum number of parked messages in one tick. A frame with more messages is parked."""
SLICE_WORK = 1 << 16
"""Maximum work of one slice, and of the short frames of one tick, in characters or token ids: some 25 ms.

A larger frame is parked. A single larger prompt is a slice of its own, because a tokenizer cannot be interrupted.
"""


def work_of(message: ToTokenizer) -> int:
    """Return the number of characters or token ids that the tokenizer must process for ``message``.

    It is 0 for messages that other threads handle or that only pass through.
    """
    if isinstance(message, TokenizeReq):
        if message.text is not None:
            return len(message.text)
        return len(message.input_ids or ())
    if isinstance(message, ChatRendered):
        return message.characters
    return 0  # conversations to be rendered and questions about text have threads of their own


class Tick(NamedTuple):
    """What to do in one tick."""

    messages: list[ToTokenizer]
    """What to handle now, in this order."""
    ended: list[Message]
    """What to tell HTTP of requests that ended here."""


@dataclass(eq=False)
class _ParkedRequest:
    """A request that is parked at the place ``number``."""

    req: TokenizeReq
    number: int
    aborts: dict[str, str] = field(default_factory=dict)
    """Reasons by the rid of each answer that is aborted."""
    abort_numbers: list[int] = field(default_factory=list)
    """Places of the aborts, which are parked behind it."""


class TokenizerInbox:
    """Ticks of work from a channel. ``here``: see ``Timing``."""

    def __init__(self, receiver: Receiver[ToTokenizer], here: InstanceRole) -> None:
        self._receiver = receiver
        self._here = here
        self._aside: OrderedDict[int, ToTokenizer] = OrderedDict()
        """Parked messages by their places, in the order of their arrival."""
        self._numbers = itertools.count()
        self._parked: dict[str, _ParkedRequest] = {}
        """Parked requests, by the rid of each of their answers."""

    def next_tick(self) -> Tick:
        """Receive what has arrived, and return the messages to handle now.

        Wait if nothing has arrived and nothing is put aside. The messages of a frame with much work are put aside
        ("parked"), and later calls return them in slices. A request with all answers aborted meanwhile is returned in
        ``ended`` instead.
        """
        tick = Tick([], [])
        work = 0
        while len(tick.messages) < TICK_MESSAGES and work < SLICE_WORK:
            try:
                arrived = self._receiver.recv(0 if tick.messages or tick.ended or self._aside else -1)
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
                    tick.messages.append(message)
                    for rid in sorted(self._parked):
                        self._abort(AbortReq(rid, message.reason), tick)
                elif isinstance(message, AbortReq) and message.rid in self._parked:
                    self._abort(message, tick)
                elif is_long or getattr(message, "rid", None) in self._parked:
                    self._park(message)
                else:
                    tick.messages.append(message)
        tick.messages.extend(self._next_slice())
        return tick

    def _park(self, message: ToTokenizer) -> int:
        number = next(self._numbers)
        self._aside[number] = message
        if isinstance(message, TokenizeReq):
            self._parked.update(dict.fromkeys(message.rids, _ParkedRequest(message, number)))
        return number

    def _abort(self, message: AbortReq, tick: Tick) -> None:
        """Put the abort of one answer aside, behind its request, which is put aside already.

        The abort of the last answer ends the request at once. It is removed with its aborts, and its result goes to
        ``tick.ended``.
        """
        parked = self._parked.get(message.rid)
        if parked is None or message.rid in parked.aborts:
            return  # ended with another of its answers, or a client that repeats itself
        parked.aborts[message.rid] = message.reason
        if len(parked.aborts) < len(parked.req.rids):
            parked.abort_numbers.append(self._park(message))
            return
        for number in (parked.number, *parked.abort_numbers):
            del self._aside[number]
        self._forget(parked.req)
        tick.ended.append(end_of_aborted(parked.req, parked.aborts, self._here))

    def _forget(self, req: TokenizeReq) -> None:
        for rid in req.rids:
            del self._parked[rid]

    def _next_slice(self) -> list[ToTokenizer]:
        """Remove the oldest messages that were put aside, and return them.

        They are at most ``SLICE`` messages with ``SLICE_WORK`` of work, but the first one is returned however much work
        it is. The list is empty if none is put aside.
        """
        messages: list[ToTokenizer] = []
        work = 0
        while self._aside and len(messages) < SLICE:
            number, message = next(iter(self._aside.items()))
            more = work_of(message)
            if messages and more and work + more > SLICE_WORK:
                break
            work += more
            del self._aside[number]
            if isinstance(message, TokenizeReq):
                self._forget(message)
            messages.append(message)
        return messages
