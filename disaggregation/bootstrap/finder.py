"""Questions to bootstrap servers for registrations, which never make the scheduler wait.

One daemon thread runs all questions at once on an event loop, so a host that does not answer delays no other. A server
that answers "not yet" (503) is asked again for ``patience`` seconds. One that does not answer at all is asked only for
``reach_seconds``, because waiting requests could go elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable

import httpx

from ...messages.decode import shown
from ...runtime.web.ports import is_loopback
from ..errors import InvalidRegistration, NotRegistered, TransferError
from ..wire.tcp_socket import address_family
from .registration import MAX_REGISTRATION_BYTES, Reached, decode_registration, error_text, registration_url

MAX_ASKING = 64
"""Hosts that are asked at a time: requests name them, and each one costs sockets and memory."""
REACH_SECONDS = 1.5
PATIENCE_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 0.5

log = logging.getLogger(__name__)

OnFound = Callable[[str, int, Reached | str], None]


class RegistrationFinder:
    """Thread that finds registrations. Each ``find`` leads to one ``on_found(host, port, result or error)`` from it.

    ``host`` may be a name. It is looked up in this thread, and the result has the address that answered.
    """

    def __init__(
        self, on_found: OnFound, *, reach_seconds: float = REACH_SECONDS, patience: float = PATIENCE_SECONDS
    ) -> None:
        self._on_found = on_found
        self._reach_seconds = reach_seconds
        self._patience = patience
        self._asking = asyncio.Semaphore(MAX_ASKING)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="registration-finder", daemon=True)
        self._thread.start()

    def find(self, host: str, port: int) -> None:
        """Begin to ask the bootstrap server at ``host``:``port`` for its registration, and return at once. Thread-safe.

        The result, or the error, comes later by ``on_found``, called from the finder's thread.
        """
        asyncio.run_coroutine_threadsafe(self._answer(host, port), self._loop)

    def stop(self) -> None:
        """Give up open questions, without calling ``on_found`` for them, and wait for the thread to end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _answer(self, host: str, port: int) -> None:
        try:
            async with self._asking:
                answer: Reached | str = await self._ask_until(host, port)
        except TransferError as e:
            answer = str(e)
        except Exception as e:
            # Hosts come from requests. Whatever error a strange one causes, requests wait for this answer.
            log.exception("asking the bootstrap server %s:%d failed", host, port)
            answer = f"{type(e).__name__}: {e}"
        self._on_found(host, port, answer)

    async def _ask_until(self, host: str, port: int) -> Reached:
        start = time.monotonic()
        pause = FIRST_PAUSE_SECONDS
        # Plain HTTP only: without this, each client would load all certificates of the system.
        async with httpx.AsyncClient(timeout=self._reach_seconds, trust_env=False, verify=False) as client:
            while True:
                limit = self._patience
                try:
                    # The client's limit is one of silence; an answer that drips is cut off here.
                    async with asyncio.timeout(2 * self._reach_seconds):
                        return await _ask(client, registration_url(host, port))
                except NotRegistered as e:
                    error: TransferError = e
                except (httpx.InvalidURL, UnicodeError) as e:
                    raise InvalidRegistration(f"{host}:{port} is no address: {e}") from e
                except (httpx.HTTPError, TimeoutError) as e:
                    limit = self._reach_seconds
                    error = NotRegistered(f"it does not answer: {str(e) or type(e).__name__}")
                if time.monotonic() + pause - start > limit:
                    raise error
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _ask(client: httpx.AsyncClient, url: httpx.URL) -> Reached:
    """Ask the bootstrap server at ``url`` once, and return its registration with the address that it was reached at.

    Raises ``NotRegistered`` if it has none now, and ``InvalidRegistration`` for an invalid answer.
    """
    body = b""
    # Uncompressed: a hostile answer of a few bytes could otherwise unpack to a thousand times as many.
    async with client.stream("GET", url, headers={"accept-encoding": "identity"}) as response:
        # None if the connection is closed already. Then its answer is of no use, either.
        place = response.extensions["network_stream"].get_extra_info("server_addr")
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_REGISTRATION_BYTES:
                raise InvalidRegistration("its answer is too long for a registration: is this a bootstrap server?")
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        # The client that named this address must not see its server's answer.
        log.info("the bootstrap server at %s has no registration: %s", url.netloc.decode(), error_text(body, 503))
        raise NotRegistered("it has no registration to give now, and the log here says why")
    if response.status_code != httpx.codes.OK:
        raise InvalidRegistration(f"it answered with HTTP status {response.status_code}: is this a bootstrap server?")
    if place is None:
        raise NotRegistered("the connection broke")
    registration = decode_registration(body)
    address = str(place[0])
    if registration.host and not is_loopback(address):  # an instance of this host is at its server's address
        address = await _address(registration.host, address)
    return Reached(registration, address)


async def _address(host: str, reached: str) -> str:
    """Return the IP address at which to reach an instance that has registered with ``host``, a name or an address.

    ``reached``: the address at which its bootstrap server answered. The result is of the same family (IPv4 or IPv6).
    Raises ``NotRegistered`` if ``host`` has no such address.
    """
    family = address_family(reached)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    except OSError as e:
        raise NotRegistered(f"it says that it is reached at {shown(host)}, and that is no address: {e}") from e
    return str(found[0][4][0])
