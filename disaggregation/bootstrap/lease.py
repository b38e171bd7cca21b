"""The lease that keeps an instance's registration at its bootstrap server.

    start ─▶ registers ─▶ renews every third of the lease ─▶ withdraw or stop
               ▲  ▲               │ no answer, or an error        │ pause
               │  └─ some time ───┘                               │
               └─ change ─ withdrawn for now ◀────────────────────┘

Only its owner ends it: a lost lease is taken again. When it is tried again depends on the bootstrap server:

- without an answer, soon, because the server may be starting, or restarting without memory;
- after an error, with pauses that grow to a third of the lease;
- if a newer instance has registered (409), once per lease, because an operator has to look into that.

While the lease is lost, ``lost`` says so, and the instance's ``/health`` with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx
import msgspec

from .registration import Registration, error_text, registration_url

log = logging.getLogger(__name__)

REQUEST_SECONDS = 2.0
RETRY_SECONDS = 0.2


class LeaseKeeper:
    """Renews ``registration``'s lease in a daemon thread of its own; no method waits for the network.

    ``port`` tells where the bootstrap server listens on ``host``, None as long as it doesn't.
    ``secret`` is what the bootstrap server was given to know its own instance by.
    """

    def __init__(self, registration: Registration, host: str, port: Callable[[], int | None], secret: str) -> None:
        self._registration = registration
        self._host = host
        self._port = port
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._renewed_at = time.monotonic()
        self._problem = ""
        self._ended = threading.Event()
        self._withdraw = False
        self._paused = False
        self._changed = threading.Event()
        """Set when the registration changed, or is to be paused or withdrawn."""
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread, which registers the instance and renews its lease until ``stop`` or ``withdraw``."""
        self._renewed_at = time.monotonic()
        self._thread.start()

    def change(self, registration: Registration) -> None:
        """Replace the registration that the lease is renewed with.

        The bootstrap server gets the new one at the next renewal, within a third of the lease.
        After ``pause``, this ends the pause, and the server gets it at once.
        """
        self._registration = registration
        if self._paused:
            self._renewed_at, self._paused = time.monotonic(), False
            self._changed.set()

    def pause(self) -> None:
        """Remove the registration from the bootstrap server until ``change``; the thread does it soon."""
        self._paused = True
        self._changed.set()

    def withdraw(self) -> None:
        """Renew no more, and have the thread remove the registration from the bootstrap server for good."""
        self._withdraw = True
        self.stop()

    def stop(self) -> None:
        """Renew no more. The registration stays at the bootstrap server until its lease has run out."""
        self._ended.set()
        self._changed.set()

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the thread to end, and return whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def lost(self, now: float) -> str | None:
        """Return why peers cannot find this instance at ``now`` (``time.monotonic()``); None with a valid lease or when
        paused.
        """
        if self._paused:
            return None
        late = now - self._renewed_at - self._registration.ttl
        if late <= 0:
            return None
        return f"decode instances can't find this instance, for {late:.0f} s: {self._problem or 'no answer yet'}"

    def _run(self) -> None:
        # trust_env: a proxy from the environment has no business between processes of one instance. verify: this is
        # plain HTTP, and the client would load all certificates of the system.
        with httpx.Client(timeout=REQUEST_SECONDS, trust_env=False, verify=False, headers=self._headers) as client:
            pause = RETRY_SECONDS
            while not self._ended.is_set():
                if self._paused:
                    self._take_out(client, for_now=True)
                    self._sleep(None)
                    continue
                status, problem = self._register(client)
                self._note(problem)
                if not problem:
                    pause, wait = RETRY_SECONDS, self._registration.ttl / 3
                elif status == httpx.codes.CONFLICT:
                    wait = self._registration.ttl
                elif status is None:
                    wait = RETRY_SECONDS
                else:
                    wait, pause = pause, min(2 * pause, self._registration.ttl / 3)
                self._sleep(wait)
            if self._withdraw:
                self._take_out(client)

    def _sleep(self, seconds: float | None) -> None:
        self._changed.wait(seconds)
        self._changed.clear()

    def _register(self, client: httpx.Client) -> tuple[int | None, str]:
        """Send the registration to the bootstrap server, which grants or renews the lease.

        Return the answer's HTTP status (None for no answer), and what is wrong, "" for nothing.
        """
        asked_at, port = time.monotonic(), self._port()
        if port is None:
            return None, "this instance's bootstrap server has not started yet"
        url = registration_url(self._host, port)
        try:
            response = client.put(url, content=msgspec.json.encode(self._registration))
        except httpx.HTTPError as e:
            return None, f"the bootstrap server {url} does not answer: {str(e) or type(e).__name__}"
        if response.is_success:
            self._renewed_at = asked_at
            return response.status_code, ""
        text = error_text(response.content, response.status_code)
        return response.status_code, f"the bootstrap server {url} refused the registration: {text}"

    def _note(self, problem: str) -> None:
        """Log the beginning and the end of an outage, not each try.

        ``problem``: why the last try failed, "" if it succeeded.
        """
        if problem and not self._problem:
            log.warning("%s; trying again", problem)
        elif self._problem and not problem:
            log.info("registered with the bootstrap server again")
        self._problem = problem

    def _take_out(self, client: httpx.Client, *, for_now: bool = False) -> None:
        port = self._port()
        if port is None:
            return
        url = registration_url(self._host, port)
        try:
            client.delete(url, params={"epoch": self._registration.epoch, "for_now": int(for_now)})
        except httpx.HTTPError as e:
            log.warning("can't withdraw from the bootstrap server %s: %s; the lease will run out", url, e)
