"""All links of a decode instance to prefill instances: opening, greeting, heartbeats, and noticing death.

Death shows in three ways, whichever is first: the control connection breaks, the worker loses the data link, or the
peer is silent for ``heartbeat_timeout``. There is one link to an instance, by whichever address it was found, and the
next one is opened only after the last is down; links are numbered, so that late news of one isn't taken for the next's.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

from ...messages.decode import UndeclaredMessage, shown
from ...messages.handover import PROTOCOL_VERSION, Heartbeat, Hello, Refused, Welcome
from ...messages.worker import ConnectPeer, DisconnectPeer, PeerConnected, PeerLinkDown, WorkerReady
from ...runtime.refusal_log import RefusalLog
from ..bootstrap.finder import REACH_SECONDS
from ..bootstrap.registration import Reached
from ..wire.reactor import Reactor
from .control.client import ControlClient
from .control.frames import MESSAGES_A_TURN
from .host import HandoverHost
from .prefill_link import LinkState, PrefillLink

log = logging.getLogger(__name__)

WORKER_SECONDS = 30.0
"""For the worker to be ready for a peer; its own limits are shorter."""


class PrefillLinks:
    """Owner of the links. ``on_gone`` and ``on_down`` tell the receivers; ``find`` must not block.

    ``reactor`` watches their sockets: whoever waits for it need not know them.
    """

    def __init__(
        self,
        host: HandoverHost,
        worker: WorkerReady,
        backend: str,
        heartbeat: tuple[float, float],
        reactor: Reactor,
        find: Callable[[str, int], None],
        on_message: Callable[[PrefillLink, Any], None],
        on_gone: Callable[[PrefillLink], None],
        on_down: Callable[[PrefillLink], None],
    ) -> None:
        self._host = host
        self._worker = worker
        self._backend = backend
        self._interval, self._timeout = heartbeat
        self._reactor = reactor
        self._fetch_registration = find
        self._on_message = on_message
        self._on_gone = on_gone
        self._on_down = on_down
        self._open: dict[tuple[str, int], PrefillLink] = {}
        self._closing: list[PrefillLink] = []
        self._numbers = itertools.count(1)
        self._beat_at = 0.0
        self._refusals = RefusalLog(log, "from prefill instances")

    def link_to(self, host: str, port: int, now: float) -> PrefillLink:
        """The link to the prefill behind this bootstrap address; a new one where there is none."""
        link = self._open.get((host, port))
        if link is None:
            link = self._open[(host, port)] = PrefillLink(host, port, now, next(self._numbers))
            self._ask(link)
        return link

    def on_found(self, host: str, port: int, answer: Reached | str, now: float) -> None:
        """The bootstrap server's answer: a registration, or why there is none."""
        link = self._open.get((host, port))
        if link is None or link.state is not LinkState.ROUTING:
            return
        if isinstance(answer, str):
            self._gone(link, f"the bootstrap server {host}:{port} gave no registration: {answer}")
            return
        registration = answer.registration
        known = next(
            (k for k in self._open.values() if k.peer_epoch == registration.epoch and k.client is not None), None
        )
        if known is not None:
            link.same_as = self._open[(host, port)] = known
            return
        if any(k.peer_epoch == registration.epoch for k in (*self._open.values(), *self._closing)):
            # There is one link to an instance at a time, so that news of a link is about one only: ask again later.
            link.asked = False
            return
        link.reached = answer
        link.state, link.peer_epoch, link.down, link.heard_at = LinkState.GREETING, registration.epoch, False, now
        link.order = registration.layout.order
        # The worker lets a peer that it has lost before write here again only when told so, and before that peer tries.
        self._host.to_worker(ConnectPeer(registration.epoch, link.number, b""))

    def on_peer_connected(self, event: PeerConnected, now: float) -> None:
        """The worker is ready for a prefill's writes (or is not): greet the prefill."""
        for link in [k for k in self._open.values() if k.number == event.link and k.state is LinkState.GREETING]:
            if event.error is not None:
                self._gone(link, f"this instance can't take its pages: {event.error}")
            else:
                self._greet(link, now)

    def _greet(self, link: PrefillLink, now: float) -> None:
        worker = self._worker
        assert link.reached is not None
        try:
            link.client = ControlClient(self._reactor, link.reached.address, link.reached.registration.control_port)
        except (OSError, ValueError) as e:
            self._gone(link, f"its control port can't be connected to: {e}")
            return
        link.greeted, link.heard_at = True, now
        link.send(
            Hello(
                epoch=link.peer_epoch,
                sender=self._host.epoch,
                version=PROTOCOL_VERSION,
                fingerprint=worker.fingerprint,
                layout=worker.layout,
                backend=self._backend,
                metadata=worker.backend_metadata,
            )
        )

    def poll(self, now: float) -> None:
        """Read every link, beat, and drop those that are silent."""
        for link in set(self._open.values()):
            if link.client is None:
                self._wait(link, now)
                continue
            self._read(link, link.client, now)
            if link.state is LinkState.GONE:
                continue
            # A dead link may still have brought messages: they were read first.
            ended = link.client.connection_ended()
            if ended is not None:
                self._gone(link, ended)
            elif link.greeted and now - link.heard_at > self._timeout:
                self._gone(link, f"the prefill instance was silent for {now - link.heard_at:.1f} s")
        if now - self._beat_at >= self._interval:
            self._beat_at = now
            for link in set(self._open.values()):
                if link.greeted:
                    link.send(Heartbeat(link.peer_epoch))

    def _wait(self, link: PrefillLink, now: float) -> None:
        """For a registration, or for the worker."""
        self._ask(link)
        if not link.asked and now - link.opened_at > REACH_SECONDS:
            self._gone(link, "the last link to it is not down: it still holds this instance's KV memory")
        elif link.state is LinkState.GREETING and now - link.heard_at > WORKER_SECONDS:
            self._gone(link, f"this instance's worker did not let it in within {WORKER_SECONDS:.0f} s")

    def flush(self) -> None:
        """Send what the turn has queued."""
        for link in self._open.values():
            link.flush()

    def on_peer_link_down(self, event: PeerLinkDown) -> None:
        """The worker says that a peer can't write here any more, on our wish or by itself."""
        for link in [k for k in self._open.values() if k.number == event.link]:
            link.down = True
            self._gone(link, "the prefill instance's worker closed the data link or died")
        for link in [k for k in self._closing if k.number == event.link]:
            link.down = True
            self._closing.remove(link)
            self._on_down(link)

    def info(self) -> list[dict[str, Any]]:
        """For /server_info."""
        return [
            {"bootstrap": f"{k.host}:{k.port}", "state": k.state.name.lower(), "epoch": k.peer_epoch}
            for k in [*dict.fromkeys(self._open.values()), *self._closing]
        ]

    @property
    def refused(self) -> int:
        """Frames and messages that were refused since the start."""
        return self._refusals.total

    @property
    def connected(self) -> int:
        """Prefill instances that can be asked for pages now."""
        return sum(link.state is LinkState.READY for link in set(self._open.values()))

    @property
    def active(self) -> bool:
        """Whether any link needs heartbeats."""
        return bool(self._open)

    def _ask(self, link: PrefillLink) -> None:
        if link.asked or any((k.host, k.port) == (link.host, link.port) for k in self._closing):
            return
        link.asked = True
        self._fetch_registration(link.host, link.port)

    def _read(self, link: PrefillLink, client: ControlClient, now: float) -> None:
        left = MESSAGES_A_TURN
        while left > 0 and link.state is not LinkState.GONE:
            try:
                messages = client.recv()
            except UndeclaredMessage as e:
                self._refusals.add(f"{link.host}:{link.port}: {e}")
                left -= 1
                continue
            if messages is None:
                return
            left -= max(1, len(messages))
            link.heard_at = now
            for message in messages:
                if message.epoch != self._host.epoch:
                    text = f"dropped {type(message).__name__} for epoch {message.epoch}, which is not this one's"
                    self._refusals.add(f"{link.host}:{link.port}: {text}")
                elif link.state is LinkState.GONE:
                    return
                elif isinstance(message, Welcome) and link.greeted:
                    link.state = LinkState.READY
                    log.info("linked to prefill %s:%d (epoch %s)", link.host, link.port, link.peer_epoch)
                elif isinstance(message, Refused):
                    link.status = 409
                    self._gone(link, f"the prefill instance refused this decode instance: {shown(message.reason)}")
                elif not isinstance(message, Heartbeat | Welcome):
                    self._on_message(link, message)

    def _gone(self, link: PrefillLink, reason: str) -> None:
        if link.state is LinkState.GONE:
            return
        log.warning("link to prefill %s:%d is gone: %s", shown(link.host), link.port, shown(reason))
        link.state, link.reason = LinkState.GONE, reason
        for address in [address for address, other in self._open.items() if other is link]:
            del self._open[address]
        if link.client is not None:
            link.flush()
            link.client.close()
        if not link.down:
            self._closing.append(link)
            self._host.to_worker(DisconnectPeer(link.peer_epoch, link.number))
        self._on_gone(link)
