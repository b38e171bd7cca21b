"""Protection of a control connection: none, or the cluster secret.

With a secret, each end's greeting carries an X25519 key that is made for this connection alone. Both ends combine the
shared secret of these keys with the cluster secret. The derived keys seal each frame by ChaCha20-Poly1305, with the
frame's number as nonce. This has three effects:

- Without the cluster secret, frames can be neither written nor read.
- Recorded frames can't be replayed, neither on this connection nor on another one.
- A secret that leaks later does not decrypt earlier connections.

This is the pattern ``NNpsk0`` of the Noise protocol framework, with the keys in the greetings.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import ProtocolBroken
from .frames import GREETING, KEY_BYTES, NO_KEY, greeting

SEAL_BYTES = 16
"""Length that sealing adds to a frame, in bytes."""
NONCE = struct.Struct("<4xQ")


class _Ciphers(NamedTuple):
    sending: ChaCha20Poly1305
    receiving: ChaCha20Poly1305


class ConnectionCipher:
    """Sealing state of one connection.

    ``keys``: keys of the cluster's secrets, the current one first; empty without a secret. The dialling end uses the
    first. The dialled end accepts any, and answers with the one that sealed the first frame.
    """

    def __init__(self, keys: list[bytes], *, dialled: bool) -> None:
        self._keys = keys
        self._dialled = dialled
        self._private = X25519PrivateKey.generate() if keys else None
        public = self._private.public_key().public_bytes_raw() if self._private is not None else NO_KEY
        self.greeting = greeting(public)
        self._candidates: list[_Ciphers] = []
        self._sent = 0
        self._received = 0

    @property
    def ready(self) -> bool:
        """Whether frames can be sealed: both ends have greeted, and the secret in use is known."""
        return not self._keys or len(self._candidates) == 1

    @property
    def overhead(self) -> int:
        """Length that sealing adds to a frame here, in bytes."""
        return SEAL_BYTES if self._keys else 0

    @property
    def unanswered(self) -> bool:
        """Whether there is a secret and no frame of the other end has come yet."""
        return bool(self._keys) and not self._received

    def greeted(self, theirs: bytes) -> None:
        """Derive the keys from the other end's whole greeting. Raises ``ProtocolBroken`` if the ends don't match."""
        problem = self._agree(theirs[GREETING.size :], theirs)
        if problem is not None:
            raise ProtocolBroken(problem)

    def _agree(self, public: bytes, theirs: bytes) -> str | None:
        if self._private is None:
            if public == NO_KEY:
                return None
            return "it has a cluster secret, and this instance none: start both with the same --cluster-secret-file"
        if public == NO_KEY:
            return "it has no cluster secret: start it with this instance's --cluster-secret-file"
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # a point that would make the result public
            return "its key is none"
        both = self.greeting + theirs if self._dialled else theirs + self.greeting
        keys = self._keys[:1] if self._dialled else self._keys
        self._candidates = [_ciphers(key, shared, both, dialled=self._dialled) for key in keys]
        return None

    def seal(self, frame: bytes) -> bytes:
        """Return ``frame`` as it is sent: sealed if there is a secret."""
        if not self._keys:
            return frame
        self._sent += 1
        return self._candidates[0].sending.encrypt(NONCE.pack(self._sent), frame, None)

    def open(self, sealed: bytes) -> bytes:
        """Return the content of a frame. Raises ``ProtocolBroken`` if no known secret has sealed it."""
        if not self._keys:
            return sealed
        self._received += 1
        for ciphers in self._candidates:
            try:
                frame = ciphers.receiving.decrypt(NONCE.pack(self._received), sealed, None)
            except InvalidTag:
                continue
            self._candidates = [ciphers]
            return frame
        raise ProtocolBroken("it has another cluster secret: give both the same --cluster-secret-file")


def _ciphers(key: bytes, shared: bytes, greetings: bytes, *, dialled: bool) -> _Ciphers:
    made = HKDF(SHA256(), 2 * KEY_BYTES, salt=sha256(greetings).digest(), info=b"pdserve control").derive(key + shared)
    first, second = ChaCha20Poly1305(made[:KEY_BYTES]), ChaCha20Poly1305(made[KEY_BYTES:])
    return _Ciphers(first, second) if dialled else _Ciphers(second, first)
