"""HTTP requests of a hostile peer to instances: legs that it has signed as a router, and reads of moved answers.

Each waits for its answer in a thread of its own.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from .cluster import Cluster
from .peer_messages import FAILED
from .signed import Signer
from .watch import Record

AT_ONCE = 6


class PeerRequests:
    """All requests of one thread's peer."""

    def __init__(self, cluster: Cluster, record: Record) -> None:
        self._instances, self._record = cluster.instances, record
        self._signer = Signer(cluster)
        self._http = httpx.Client(timeout=60, trust_env=False)
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._free = threading.Semaphore(AT_ONCE)

    def close(self) -> None:
        """End what is under way."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    def take_place(self) -> bool:
        """Take the place of one more leg. Return False if as many as may be are under way."""
        return self._free.acquire(blocking=False)

    def ask(self, leg: str, content: dict[str, Any], bootstrap_port: int, room: int) -> None:
        """Send a leg, signed, for which a place is taken."""
        content = content | self._signer.bootstrap(bootstrap_port, room, leg)
        self._threads.submit(self._ask, leg, content)

    def read_moved(self, role: str, ticket: dict[str, Any]) -> None:
        """Ask for the rest of an answer by a ticket."""
        self._threads.submit(self._read_moved, role, ticket)

    def _ask(self, leg: str, content: dict[str, Any]) -> None:
        try:
            body = self._signer.body(content)
            url = self._instances[leg]
            headers = self._signer.headers(self._signer.epoch(url, self._http), "POST", "/generate", body)
            self._record.sent(f"{leg} leg", body[:200])
            answer = self._http.post(url + "/generate", content=body, headers=headers)
            # A hand-over that the peer broke is a 502, and what it says of a failure of its own is the answer's status.
            is_own = answer.status_code == 502 or FAILED.encode() in answer.content
            self._record.got(f"{leg} leg", 200 if is_own else answer.status_code, answer.content)
        except httpx.HTTPError as e:
            self._record.sent(f"{leg} leg", f"no answer: {e!r}")
        finally:
            self._free.release()

    def _read_moved(self, role: str, ticket: dict[str, Any]) -> None:
        with suppress(httpx.HTTPError):
            headers = {"x-pdserve-ticket": msgspec.json.encode(ticket).decode()}
            self._record.sent("moved", ticket)
            answer = self._http.post(self._instances[role] + "/moved", content=b'{"text": "x"}', headers=headers)
            self._record.got("moved", answer.status_code, answer.content)
