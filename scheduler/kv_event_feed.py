"""Publishes what the prefix cache stores and loses (``messages/kv_events.py`` says how), and replays it.

Nobody is waited for: who reads too slowly misses batches, sees the gap and asks again. What comes from the sockets is
hostile: one request of 8 bytes is all that is understood, and a turn sends few batches.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import zmq

from ..mem_cache.kv_events import KVEventLog
from ..messages.kv_events import END, Frame, KVEventBatch, encode_batch, pack_seq, unpack_seq
from ..runtime.options import ServerOptions

log = logging.getLogger(__name__)

REQUESTS_A_TURN, BATCHES_A_TURN, MOST_REPLAYS = 8, 64, 64
"""The scheduler serves replays between two of its turns: neither many nor long ones hold it up."""
LONGEST_REQUEST = 64
"""Bytes: anything longer ends the connection."""


class KVEventFeed:
    """Owner of both sockets. Raises ``zmq.ZMQError`` where an address can't be had."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: ServerOptions, events: KVEventLog) -> None:
        self._events = events
        self._topic = options.kv_events_topic.encode()
        self._kept: deque[Frame] = deque(maxlen=options.kv_events_buffer)
        self._next = 0
        self._replays: dict[bytes, int] = {}
        """Who waits for batches, from which number on; in turn."""
        assert options.kv_events_endpoint is not None
        self._pub = context.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.bind(options.kv_events_endpoint)
        self.replay: zmq.Socket[bytes] | None = None
        """Whoever has a poller registers it."""
        if options.kv_events_replay_endpoint is not None:
            self.replay = context.socket(zmq.ROUTER)
            self.replay.linger = 0
            self.replay.maxmsgsize = LONGEST_REQUEST
            self.replay.bind(options.kv_events_replay_endpoint)
        log.info("KV events: %s, replay: %s", options.kv_events_endpoint, options.kv_events_replay_endpoint or "none")

    @property
    def addresses(self) -> tuple[str, str | None]:
        """Where both are bound."""
        return _bound(self._pub), _bound(self.replay) if self.replay is not None else None

    @property
    def newest_seq(self) -> int:
        """Of what was published last, -1: nothing yet."""
        return self._next - 1

    def turn(self) -> None:
        """Tell what has happened since the last one, and answer who asks for a replay."""
        if events := self._events.take():
            frame = Frame(self._next, encode_batch(KVEventBatch(time.time(), events)))
            self._next += 1
            self._kept.append(frame)
            self._pub.send_multipart([self._topic, pack_seq(frame.seq), frame.payload], zmq.NOBLOCK)
        if self.replay is not None:
            self._take_requests(self.replay)
            self._replay_some(self.replay)

    @property
    def is_replaying(self) -> bool:
        """Whether the next turn has something to do, though nothing comes."""
        return bool(self._replays)

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
            # Who asks again before it was answered begins anew; of too many, the last ones have to ask again.
            if who in self._replays or len(self._replays) < MOST_REPLAYS:
                self._replays[who] = first

    def _replay_some(self, socket: zmq.Socket[bytes]) -> None:
        """A few batches, to those who wait for them in turn."""
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
        """Let go of the sockets."""
        self._pub.close()
        if self.replay is not None:
            self.replay.close()


def _bound(socket: zmq.Socket[bytes]) -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
