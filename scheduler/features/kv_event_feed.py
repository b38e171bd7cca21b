"""Publishes what the prefix cache stores and loses (format: ``messages/kv_events.py``), and replays it.

The feed waits for no reader: a slow one misses batches, sees the gap and asks again. Input from the sockets is hostile:
only requests of 8 bytes are understood, and a tick sends few batches.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque

import zmq

from ...mem_cache.kv_events import KVEventLog
from ...messages.kv_events import END, Frame, KVEventBatch, encode_batch, pack_seq, unpack_seq
from ..feature import Feature
from ..options import SchedulerOptions

log = logging.getLogger(__name__)

REQUESTS_A_TURN, BATCHES_A_TURN, MOST_REPLAYS = 8, 64, 64
"""Limits per tick. The scheduler serves replays between two ticks, so neither many nor long ones may hold it up."""
LONGEST_REQUEST = 64
"""Maximum bytes of a request: anything longer ends the connection."""


class KVEventFeed(Feature):
    """Owner of both sockets. Raises ``zmq.ZMQError`` if an address can't be bound."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        options: SchedulerOptions,
        events: KVEventLog,
        endpoint: str,
    ) -> None:
        """Bind the sockets: ``endpoint`` for the feed, and the one for replays if the options name one."""
        self._events = events
        self._topic = options.kv_events_topic.encode()
        self._kept: deque[Frame] = deque(maxlen=options.kv_events_buffer)
        self._next = 0
        self._replays: dict[bytes, int] = {}
        """Replays under way: the connection and the number of its next batch, in round-robin order."""
        self._pub = context.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.bind(endpoint)
        self.replay: zmq.Socket[bytes] | None = None
        """Socket of the replays; None without. The loop registers it with its poller."""
        if options.kv_events_replay_endpoint is not None:
            self.replay = context.socket(zmq.ROUTER)
            self.replay.linger = 0
            self.replay.maxmsgsize = LONGEST_REQUEST
            self.replay.bind(options.kv_events_replay_endpoint)
        log.info("KV events: %s, replay: %s", endpoint, options.kv_events_replay_endpoint or "none")

    @property
    def addresses(self) -> tuple[str, str | None]:
        """Addresses to which the two sockets are bound."""
        return _bound(self._pub), _bound(self.replay) if self.replay is not None else None

    @property
    def newest_seq(self) -> int:
        """Number of the last batch that was published, -1 before the first."""
        return self._next - 1

    def tick(self, now: float) -> None:
        """Publish the events since the last tick as one batch, and send some of the batches that readers asked for
        again.
        """
        if events := self._events.take():
            frame = Frame(self._next, encode_batch(KVEventBatch(time.time(), events)))
            self._next += 1
            self._kept.append(frame)
            self._pub.send_multipart([self._topic, pack_seq(frame.seq), frame.payload], zmq.NOBLOCK)
        if self.replay is not None:
            self._take_requests(self.replay)
            self._replay_some(self.replay)

    def seconds_left(self, now: float) -> float:
        """Return 0 while a replay is under way, otherwise infinity."""
        return 0.0 if self._replays else math.inf

    def _take_requests(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(REQUESTS_A_TURN):
            try:
                asked = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                who, _, number = asked
                first = unpack_seq(number)
            except ValueError:
                continue
            # A connection that asks again before it was answered starts anew. If there are too many, the last ones have
            # to ask again.
            if who in self._replays or len(self._replays) < MOST_REPLAYS:
                self._replays[who] = first

    def _replay_some(self, socket: zmq.Socket[bytes]) -> None:
        """Send one batch each to the next waiting connections, round-robin, a limited number of batches in all.

        A connection that has got all batches is sent an end mark and waits no more. One that does not take its batch is
        dropped.
        """
        for _ in range(min(BATCHES_A_TURN, len(self._kept) + 1)):
            if not self._replays:
                return
            who, wanted = next(iter(self._replays.items()))
            del self._replays[who]
            oldest = self._next - len(self._kept)
            at = max(wanted, oldest)
            frame = self._kept[at - oldest] if at < self._next else Frame(END, b"")
            try:
                socket.send_multipart([who, b"", pack_seq(frame.seq), frame.payload], zmq.NOBLOCK)
            except zmq.ZMQError as e:
                log.debug("a replay was not taken: %s", e)
                continue
            if frame.seq != END:
                self._replays[who] = at + 1

    def close(self) -> None:
        """Close the sockets of the feed and of the replays; batches not sent yet are dropped."""
        self._pub.close()
        if self.replay is not None:
            self.replay.close()


def _bound(socket: zmq.Socket[bytes]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
