"""Keeps a prefill instance's route known to its bootstrap server.

    start ─▶ registers ─▶ renews every third of the lease ─▶ withdraw, stop, or the route is lost to another instance

A bootstrap server that does not answer is asked again soon: it may be starting, or starting again without memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import httpx
import msgspec

from .bootstrap import Route, RouteError, route_url

log = logging.getLogger(__name__)

REQUEST_SECONDS = 2.0
RETRY_SECONDS = 0.2


class LeaseKeeper:
    """Renews ``route``'s lease in a daemon thread of its own; no method waits for the network.

    ``on_lost(reason)`` is called from that thread, at its end, when another instance has taken the route over.
    """

    def __init__(self, route: Route, host: str, port: int, on_lost: Callable[[str], None] | None = None) -> None:
        self._route = route
        self._url = route_url(host, port)
        self._on_lost = on_lost
        self._ended = threading.Event()
        self._withdraw = False
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def start(self) -> None:
        """Begin to register and renew."""
        self._thread.start()

    def withdraw(self) -> None:
        """Renew no more and take the route out."""
        self._withdraw = True
        self._ended.set()

    def stop(self) -> None:
        """Renew no more; the lease runs out by itself."""
        self._ended.set()

    def join(self, timeout: float) -> bool:
        """Wait until the thread has done what it was told; False after ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # trust_env: a proxy from the environment has no business between processes of one instance.
        with httpx.Client(timeout=REQUEST_SECONDS, trust_env=False) as client:
            answered = True
            while not self._ended.is_set():
                try:
                    response = client.put(self._url, content=msgspec.json.encode(self._route))
                except httpx.HTTPError as e:
                    if answered:
                        log.warning("the bootstrap server %s does not answer: %s", self._url, e)
                    answered = False
                    self._ended.wait(RETRY_SECONDS)
                    continue
                answered = True
                if response.is_error:
                    self._lost(f"the bootstrap server {self._url} refused the route: {refusal(response)}")
                    return
                self._ended.wait(self._route.ttl / 3)
            if self._withdraw:
                self._take_out(client)

    def _take_out(self, client: httpx.Client) -> None:
        try:
            client.delete(self._url, params={"epoch": self._route.epoch})
        except httpx.HTTPError as e:
            log.warning("can't withdraw from the bootstrap server %s: %s; the lease will run out", self._url, e)

    def _lost(self, reason: str) -> None:
        log.error("%s", reason)
        if self._on_lost is not None:
            self._on_lost(reason)


def refusal(response: httpx.Response) -> str:
    """The reason in an error answer."""
    try:
        return msgspec.json.decode(response.content, type=RouteError).error
    except msgspec.MsgspecError:
        return f"HTTP status {response.status_code}"
