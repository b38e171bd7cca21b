"""The secret that the processes of a cluster recognize each other by, and the keys that are derived from it.

The file has one secret per line, at most two. The first one is used, and both are accepted. So a secret can be replaced
without stopping anything. On all hosts, add the new one after the old one, then put it first, then remove the old one.

Instances have the secret. A router only needs a key that is derived from it. With this key it signs requests to
instances and checks that they are genuine, but it cannot act as an instance (``docs/security.md``)::

    secret ── HMAC "pdserve control", "pdserve proof of an instance", … ──▶ between instances
        └──── HMAC "pdserve router" ──▶ router key ── HMAC "pdserve requests to an instance", … ──▶ router and instance
"""

from __future__ import annotations

import hmac
import math
import re
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

from .trusted_path import read_secret

MIN_CHARS = 32
MOST_SECRETS = 2
FRESH_SECONDS = 120.0
"""How far the clocks of router and instance may be apart, the way of a request included."""
SET_BACK_SECONDS = 10.0
"""How far a clock may be set back without a used signature being valid again."""
MAX_REMEMBERED = 1 << 19
"""Maximum number of signatures that are remembered: 4,032 requests a second, in some 70 MB."""
OPTION = "--cluster-secret-file"
ROUTER_KEY = b"router-key-"
"""What the line of a router key begins with, before the key in hexadecimal digits."""
ROUTER_KEY_LINE = re.compile(ROUTER_KEY + rb"[0-9a-f]{64}")
MAC_BYTES = 32
INHERITED = re.compile(r"/proc/self/fd/(\d+)")


class ClusterSecretError(ValueError):
    """A file that can't be used; the message says what to write instead."""


class KeyRing:
    """Secrets that keys are derived from, the one in use first. Prints as nothing that would tell them."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = tuple(secrets)

    def keys(self, purpose: str) -> list[bytes]:
        """Derive a key of 32 bytes from each secret. The keys of different purposes reveal nothing of each other."""
        return [hmac.digest(secret, b"pdserve " + purpose.encode(), "sha256") for secret in self._secrets]


class RouterKeys(KeyRing):
    """What a router and the instances behind it share."""

    @classmethod
    def read(cls, path: str | None) -> RouterKeys | None:
        """Read a file of router keys, or of the secrets that they are derived from; return None if ``path`` is None.

        Raises ``ClusterSecretError``.
        """
        return cls.load(path) if path is not None else None

    @classmethod
    def load(cls, path: str) -> RouterKeys:
        """Read a file of router keys, or of the secrets that they are derived from; raises ``ClusterSecretError``."""
        lines = _lines(OPTION, path)
        given = [line for line in lines if line.startswith(ROUTER_KEY)]
        if not given:
            return ClusterSecret(_secrets(OPTION, path, lines)).for_routers()
        if len(given) < len(lines) or not all(map(ROUTER_KEY_LINE.fullmatch, given)):
            raise ClusterSecretError(f"{OPTION} {path}: write whole lines of `pdserve router-key` alone")
        return cls([bytes.fromhex(line.removeprefix(ROUTER_KEY).decode()) for line in given])

    def text(self) -> str:
        """Return the contents of a file with these keys, one per line, as ``load`` reads it."""
        return "".join(f"{ROUTER_KEY.decode()}{key.hex()}\n" for key in self._secrets)


class ClusterSecret(KeyRing):
    """The secrets of a cluster, which its instances have."""

    @classmethod
    def read(cls, path: str | None) -> ClusterSecret | None:
        """Read a file of cluster secrets; return None if ``path`` is None.

        Raises ``ClusterSecretError``, also for a file of router keys.
        """
        if path is None:
            return None
        lines = _lines(OPTION, path)
        if any(line.startswith(ROUTER_KEY) for line in lines):
            raise ClusterSecretError(
                f"{OPTION} {path} has a router's key, which is of no use to an instance: "
                "give it the secret that the key was made of"
            )
        return cls(_secrets(OPTION, path, lines))

    def for_routers(self) -> RouterKeys:
        """Derive the keys that a router needs."""
        return RouterKeys(self.keys("router"))


def inherited_descriptors(*paths: str | None) -> tuple[int, ...]:
    """Return the numbers N of those ``paths`` that are ``/proc/self/fd/N``.

    A child process must inherit these to read them.
    """
    return tuple(int(found[1]) for path in paths if path and (found := INHERITED.fullmatch(path)))


def read_key_ring(option: str, path: str | None) -> KeyRing | None:
    """Read a file with one or two secrets, one per line; return None if ``path`` is None.

    ``option`` names it in errors. Raises ``ClusterSecretError``.
    """
    return None if path is None else KeyRing(_secrets(option, path, _lines(option, path)))


def _lines(option: str, path: str) -> list[bytes]:
    try:
        lines = [line.strip() for line in read_secret(path).splitlines()]
    except OSError as e:
        raise ClusterSecretError(f"{option} {path}: {e.strerror}") from None
    lines = [line for line in lines if line and not line.startswith(b"#")]
    if not 1 <= len(lines) <= MOST_SECRETS:
        raise ClusterSecretError(f"{option} {path} has {len(lines)} secrets: write one a line, two while you change it")
    return lines


def _secrets(option: str, path: str, lines: list[bytes]) -> list[bytes]:
    if any(len(line) < MIN_CHARS for line in lines):
        advice = f"""make one with: python -c 'import secrets; print(secrets.token_urlsafe({MIN_CHARS}))'"""
        raise ClusterSecretError(f"{option} {path}: a secret has at least {MIN_CHARS} characters; {advice}")
    return lines


class TooManySignatures(Exception):
    """More fresh signatures than are remembered. The message says what to do."""


class _Second:
    """The signatures that were made in one second, and the monotonic time until which they are remembered."""

    __slots__ = ("signatures", "until")

    def __init__(self) -> None:
        self.signatures: set[str | bytes] = set()
        self.until = -math.inf


class OnceOnly:
    """Remembers each signature for as long as it is fresh, ``MAX_REMEMBERED`` at most.

    One more is refused. If an older one were forgotten for it, that could be used again.

    The monotonic clock measures that. If the system's clock jumps, nothing is forgotten early, and when it comes back,
    new signatures are not taken for old ones. The price: if it is set back by an hour, the signatures of an hour ago
    are fresh again, and no longer remembered. Only ``SET_BACK_SECONDS`` are allowed for.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[float, _Second] = {}
        """Signatures by the time when they were made."""
        self._looked_at = -math.inf
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def is_first(self, signature: str | bytes, made: float, now: float) -> bool:
        """Record a signature that was made at Unix time ``made``, and return whether it was not recorded before.

        Check before that it is fresh at Unix time ``now``. Raises ``TooManySignatures`` if ``MAX_REMEMBERED`` are
        recorded.
        """
        here = self._monotonic()
        self._forget(here)
        second = self._seen.get(made)
        if second is not None and signature in second.signatures:
            return False
        if self._count >= MAX_REMEMBERED:
            raise TooManySignatures(
                f"this instance remembers {self._count} signed requests of the last {FRESH_SECONDS:.0f} s, "
                "the most that it can: send this one again later, or spread the load over more instances"
            )
        if second is None:
            second = self._seen[made] = _Second()
        second.signatures.add(signature)
        second.until = max(second.until, here + made + FRESH_SECONDS + SET_BACK_SECONDS - now)
        self._count += 1
        return True

    def _forget(self, here: float) -> None:
        # Routers write whole seconds, so that a look at each second in every second is enough.
        if here < self._looked_at + 1:
            return
        self._looked_at = here
        for made in [made for made, second in self._seen.items() if second.until < here]:
            self._count -= len(self._seen.pop(made).signatures)


def mac(key: bytes, content: bytes) -> str:
    """Return the keyed BLAKE2b of ``content`` in 64 hexadecimal digits (RFC 7693).

    OpenSSL's HMAC is as fast in a loop. With cold caches, as between two requests, it takes 44 us and this 12.
    """
    return blake2b(content, key=key, digest_size=MAC_BYTES).hexdigest()


def addresses(option: str, text: str | None) -> set[tuple[str, int]]:
    """Parse comma-separated addresses HOST:PORT, the value ``text`` of ``option``, into pairs of host and port.

    The set is empty if ``text`` is None. Hosts are in lower case and without brackets. Raises ``ValueError``.
    """
    found = set()
    for item in filter(None, (part.strip() for part in (text or "").split(","))):
        host, separator, port = item.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
        if not (separator and host and is_port) or len(host.split()) > 1:
            raise ValueError(f"{option} {item}: give HOST:PORT, several with commas in between")
        found.add((host.strip("[]").lower(), int(port)))
    return found
