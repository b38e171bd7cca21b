"""Authentication between the HTTP servers of one cluster, by the cluster secret.

A program that takes the port of a crashed instance must get no key and no prompt, and must not answer clients. So a
client of an instance (a router, or an instance that reads a moved answer) asks for a proof first, once per connection.
Then it signs each request for the instance that gave the proof::

    connected ── GET /livez, x-pdserve-challenge: C ──▶ x-pdserve-proof: EPOCH.PORT.MAC(C, EPOCH, PORT)
              ── x-pdserve-signature: TIME.NONCE.DIGEST.MAC(TIME, NONCE, DIGEST, EPOCH, METHOD, TARGET, CALLER) ──▶

While a secret is being replaced, an instance gives a MAC by each of the two. ``DIGEST`` is the body's. ``CALLER`` is
the value of the header with the name of the API key that a router has checked. A signature is valid once, at the
instance with this epoch, within two minutes. No API key is sent with it.

Requests that only read may be repeated in these two minutes, and are not remembered. A copy of one changes, ends and
computes nothing, and its answer passes where the copy was made. If they were remembered, clients could
fill the memory for signatures, and health checks and ``/metrics`` would be refused.

An attacker could pass a challenge on to another instance, and its proof back. So an instance that listens on a loopback
address proves its ``PORT`` (0 elsewhere, where ports may be mapped). A client also accepts an epoch from one address
only. Routers have keys of their own, with which they cannot act as an instance.

Nothing is encrypted: against attackers that read or change the network's traffic, instances need ``https://``.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import count
from typing import NamedTuple
from urllib.parse import urlsplit

from ..cluster_secret import FRESH_SECONDS, MAC_BYTES, ClusterSecret, KeyRing, OnceOnly, mac
from .keys import KEY_NAME_HEADER
from .ports import is_loopback

CHALLENGE_HEADER = b"x-pdserve-challenge"
PROOF_HEADER = b"x-pdserve-proof"
SIGNATURE_HEADER = b"x-pdserve-signature"
PROOF_PATH = "/livez"
CHALLENGE_CHARS = 32
PROOF_SECONDS = 5.0
MAX_PROOF_BYTES = 512
MAX_PLACES = 4096
INLINE_BYTES = 256 << 10
"""Maximum length of a body that is hashed on the event loop."""

Headers = Iterable[tuple[bytes, bytes]]


class Signed(NamedTuple):
    """Contents of a valid signature."""

    caller: bytes
    """Name of the API key that the router has checked."""
    digest: bytes
    """Digest of the body, by ``body_hash``."""


async def digest_of(body: Sequence[bytes | memoryview]) -> bytes:
    """Return the digest of a request's body, by ``body_hash``, in hexadecimal digits.

    Long ones are hashed on a thread: 16 MiB take 20 ms.
    """
    if sum(map(len, body)) <= INLINE_BYTES:
        return _digest(body)
    return await asyncio.to_thread(_digest, body)


def _digest(body: Sequence[bytes | memoryview]) -> bytes:
    digest = body_hash()
    for piece in body:
        digest.update(piece)
    return digest.hexdigest().encode()


def body_hash() -> blake2b:
    """Return a new hash for the pieces of a body."""
    return blake2b(digest_size=MAC_BYTES)


class ClusterAccess(ABC):
    """How a client and the servers of its cluster authenticate each other."""

    @abstractmethod
    async def digest(self, body: Sequence[bytes | memoryview]) -> bytes:
        """Return the digest of a request's body that ``signatures`` is given; b"" if requests are not signed."""

    @abstractmethod
    async def prove(self, ask: Callable[[ClusterClient], Awaitable[None]]) -> None:
        """Call ``ask`` if a new connection's server has to prove that it belongs to the cluster.

        ``ask`` sends the challenge, checks the proof by the client that it is given, and raises if that fails.
        """

    @abstractmethod
    def signatures(
        self, epoch: bytes, method: str, target: str, headers: Headers, digest: bytes
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers that sign a request to the instance ``epoch``, none if requests are not signed.

        ``target``: the path and query. ``digest``: what ``digest`` returned for the body.
        """


class OpenCluster(ClusterAccess):
    """Access to servers without a cluster secret: nothing is proven or signed."""

    async def digest(self, body: Sequence[bytes | memoryview]) -> bytes:
        """Return b"", without reading the body: requests are not signed."""
        return b""

    async def prove(self, ask: Callable[[ClusterClient], Awaitable[None]]) -> None:
        """Do nothing: no proof is asked for."""

    def signatures(
        self, epoch: bytes, method: str, target: str, headers: Headers, digest: bytes
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return no headers: requests are not signed."""
        return ()


OPEN_CLUSTER = OpenCluster()


class ClusterClient(ClusterAccess):
    """The side that connects and asks: a router with its keys, or an instance with the secret."""

    def __init__(self, ring: KeyRing, proof_seconds: float = PROOF_SECONDS) -> None:
        """Take the keys of ``ring``. ``proof_seconds``: how long a server may take to prove its membership."""
        self.proof_seconds = proof_seconds
        self._proof_keys = ring.keys("proof of an instance")
        self._key = ring.keys("requests to an instance")[0]
        self._places: dict[bytes, str] = {}
        """Where each epoch was found first."""
        self._nonces = map(f"{secrets.token_hex(8)}{{:x}}".format, count())
        """Never given by another client: the digits of a random number, then those of a counter."""

    async def digest(self, body: Sequence[bytes | memoryview]) -> bytes:
        """Return the digest of the body, by ``body_hash``, in hexadecimal digits."""
        return await digest_of(body)

    async def prove(self, ask: Callable[[ClusterClient], Awaitable[None]]) -> None:
        """Have the server prove its membership: ``ask`` sends it a challenge, and checks the answer by these keys."""
        await ask(self)

    def signatures(
        self, epoch: bytes, method: str, target: str, headers: Headers, digest: bytes
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return the one header that signs the request, with the present time."""
        return (self.sign(epoch, method, target, headers, digest, time.time()),)

    @staticmethod
    def challenge() -> bytes:
        """Draw a random challenge of ``CHALLENGE_CHARS`` hexadecimal digits."""
        return secrets.token_hex(CHALLENGE_CHARS // 2).encode()

    def proven(self, challenge: bytes, proof: bytes | None, url: str) -> bytes | None:
        """Return the epoch of the instance at ``url`` that gave ``proof`` in answer to ``challenge``.

        None if the proof shows no knowledge of the secret, or if the instance belongs to another address.
        """
        epoch, port, *macs = [*(proof or b"")[:MAX_PROOF_BYTES].split(b"."), b"", b""]
        expected = [_mac(key, challenge, epoch, port) for key in self._proof_keys]
        if not any(hmac.compare_digest(each, ours) for each in macs for ours in expected):
            return None
        if port not in (b"0", b"%d" % (urlsplit(url).port or 0)):
            return None
        while len(self._places) >= MAX_PLACES:
            del self._places[next(iter(self._places))]
        return epoch if self._places.setdefault(epoch, url) == url else None

    def sign(
        self,
        epoch: bytes,
        method: str,
        target: str,
        headers: Headers,
        digest: bytes,
        now: float,
    ) -> tuple[bytes, bytes]:
        """Make the header that signs a request to the instance ``epoch``, at Unix time ``now``.

        ``target``: the path and query. ``digest``: of the body, by ``digest_of``.
        """
        signed = b".".join((b"%.0f" % now, next(self._nonces).encode(), digest))
        mac = _mac(self._key, signed, epoch, method.encode(), target.encode(), _caller(headers))
        return SIGNATURE_HEADER, signed + b"." + mac


class OpenServer:
    """The side of a server without a cluster secret: it proves nothing, and ignores signatures."""

    requires_signatures = False
    """Whether routers sign their requests to this server."""

    def proof(self, headers: Headers) -> bytes | None:
        """Return None: there is nothing to prove."""
        return None

    def signature(self, headers: Headers) -> bytes | None:
        """Return None: signatures are ignored."""
        return None

    def check(
        self, signature: bytes, method: str, target: bytes, headers: Headers, now: float, *, only_reads: bool = False
    ) -> Signed | str:
        """Raise ``AssertionError``: this server never has a signature to check."""
        raise AssertionError("a server without a cluster secret checks no signature")


OPEN_SERVER = OpenServer()


class ClusterServer(OpenServer):
    """The side of the instance ``epoch`` that listens at ``host`` and ``port``."""

    requires_signatures = True

    def __init__(
        self,
        secret: ClusterSecret,
        epoch: str,
        host: str,
        port: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = b"%d" % (port if is_loopback(host) else 0)
        rings = (secret.for_routers(), secret)
        self._proof_keys = [key for ring in rings for key in ring.keys("proof of an instance")]
        self._keys = [key for ring in rings for key in ring.keys("requests to an instance")]
        self._epoch = epoch.encode()
        self._used = OnceOnly(monotonic)

    def proof(self, headers: Headers) -> bytes | None:
        """Return the proof in answer to the challenge in ``headers`` of a request, None if they have no valid one."""
        for name, value in headers:
            if name == CHALLENGE_HEADER and len(value) == CHALLENGE_CHARS and value.isalnum():
                macs = (_mac(key, value, self._epoch, self._port) for key in self._proof_keys)
                return b".".join((self._epoch, self._port, *macs))
        return None

    def signature(self, headers: Headers) -> bytes | None:
        """Return the signature in a request's ``headers``, None if there is none."""
        return next((value for name, value in headers if name == SIGNATURE_HEADER), None)

    def check(
        self, signature: bytes, method: str, target: bytes, headers: Headers, now: float, *, only_reads: bool = False
    ) -> Signed | str:
        """Return the contents of a ``signature``, or a message that says why it is invalid at Unix time ``now``.

        It is valid once, or any number of times if the request ``only_reads``. Raises ``TooManySignatures``.
        """
        signed, _, given = signature.rpartition(b".")
        fields, caller = signed.split(b"."), _caller(headers)
        macs = (_mac(key, signed, self._epoch, method.encode(), target, caller) for key in self._keys)
        if not any(hmac.compare_digest(given, each) for each in macs) or len(fields) != 3:
            return "the request's signature is not that of a router with this cluster's secret, for this instance"
        made = float(fields[0])
        age = now - made
        if not abs(age) <= FRESH_SECONDS:
            return f"the request's signature is {age:.0f} s old: are the clocks of router and instance right?"
        if not only_reads and not self._used.is_first(given, made, now):
            return "the request's signature was used before"
        return Signed(caller, bytes.fromhex(fields[2].decode()))


def _caller(headers: Headers) -> bytes:
    return next((value for name, value in headers if name == KEY_NAME_HEADER), b"")


def _mac(key: bytes, *fields: bytes) -> bytes:
    content = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return mac(key, content).encode()
