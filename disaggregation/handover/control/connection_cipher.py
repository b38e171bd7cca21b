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
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import ProtocolBroken
from .frames import GREETING, KEY_BYTES, greeting

SEAL_BYTES = 16
"""Length that sealing adds to a frame, in bytes."""
NONCE = struct.Struct("<4xQ")


class _Ciphers(NamedTuple):
    sending: ChaCha20Poly1305
    receiving: ChaCha20Poly1305


class Cipher(Protocol):
    """Protection of one connection's frames."""

    greeting: bytes
    """What this end sends first."""
    overhead: int
    """Length that sealing adds to a frame, in bytes."""

    @property
    def ready(self) -> bool:
        """Whether ``seal`` can be called: the keys of this connection are known."""

    @property
    def unanswered(self) -> bool:
        """Whether a frame of the other end is still missing that would prove that it has the cluster secret."""

    def greeted(self, theirs: bytes) -> None:
        """Take in the other end's whole greeting, ``theirs``, with its key. Raises ``ProtocolBroken`` if the ends don't
        match.
        """

    def seal(self, frame: bytes) -> bytes:
        """Return the bytes to send for ``frame``. Frames must be sent in the order of their calls."""

    def open(self, sealed: bytes) -> bytes:
        """Return the content of the next frame received. Raises ``ProtocolBroken`` if it was not sealed with a valid
        key.
        """


class PlainCipher:
    """Cipher of a connection without a cluster secret: frames are sent as they are."""

    overhead = 0
    ready = True
    unanswered = False

    def __init__(self) -> None:
        self.greeting = greeting()

    def greeted(self, theirs: bytes) -> None:
        """Compare the other end's greeting with this end's. Two ends without a cluster secret send equal greetings.

        Raises ``ProtocolBroken`` if they differ.
        """
        if theirs != self.greeting:
            raise ProtocolBroken(
                "it has a cluster secret, and this instance none: start both with the same --cluster-secret-file"
            )

    def seal(self, frame: bytes) -> bytes:
        """Return ``frame`` as it is: without a cluster secret nothing is encrypted."""
        return frame

    def open(self, sealed: bytes) -> bytes:
        """Return ``sealed`` as it is: without a cluster secret nothing is encrypted."""
        return sealed


class ConnectionCipher:
    """Cipher of a connection with a cluster secret.

    ``keys``: keys of the cluster's secrets, the current one first. The dialling end uses the first. The dialled end
    accepts any, and answers with the one that sealed the first frame.
    """

    overhead = SEAL_BYTES

    def __init__(self, keys: Sequence[bytes], *, dialled: bool) -> None:
        self._keys = keys
        self._dialled = dialled
        self._private = X25519PrivateKey.generate()
        self.greeting = greeting(self._private.public_key().public_bytes_raw())
        self._candidates: list[_Ciphers] = []
        self._sent = 0
        self._received = 0

    @property
    def ready(self) -> bool:
        """Whether frames can be sealed: both ends have greeted, and the secret in use is known."""
        return len(self._candidates) == 1

    @property
    def unanswered(self) -> bool:
        """Whether no frame of the other end has come yet."""
        return not self._received

    def greeted(self, theirs: bytes) -> None:
        """Derive candidate keys from the other end's whole greeting, one for each secret that may be in use.

        Raises ``ProtocolBroken`` if the greeting holds no valid key, as without a cluster secret.
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs[GREETING.size :]))
        except ValueError:  # zeros, or another point that would make the result public
            raise ProtocolBroken(
                "its key is none: if it has no cluster secret, start it with this instance's --cluster-secret-file"
            ) from None
        both = self.greeting + theirs if self._dialled else theirs + self.greeting
        keys = self._keys[:1] if self._dialled else self._keys
        self._candidates = [_ciphers(key, shared, both, dialled=self._dialled) for key in keys]

    def seal(self, frame: bytes) -> bytes:
        """Return ``frame`` encrypted, with the next number as nonce. Frames must be sent in the order of calls."""
        self._sent += 1
        return self._candidates[0].sending.encrypt(NONCE.pack(self._sent), frame, None)

    def open(self, sealed: bytes) -> bytes:
        """Return the decrypted content of the next frame received. The key that opened the first one is used from then
        on.

        Raises ``ProtocolBroken`` if no known secret has sealed it, or if it is not the next one.
        """
        self._received += 1
        for ciphers in self._candidates:
            try:
                frame = ciphers.receiving.decrypt(NONCE.pack(self._received), sealed, None)
            except InvalidTag:
                continue
            self._candidates = [ciphers]
            return frame
        raise ProtocolBroken("it has another cluster secret: give both the same --cluster-secret-file")


def make_cipher(keys: Sequence[bytes], *, dialled: bool) -> Cipher:
    """Make the cipher of a new connection. ``keys``: keys of the cluster secrets, empty without one, so nothing is
    encrypted.

    ``dialled``: whether this end has opened the connection.
    """
    return ConnectionCipher(keys, dialled=dialled) if keys else PlainCipher()


def _ciphers(key: bytes, shared: bytes, greetings: bytes, *, dialled: bool) -> _Ciphers:
    made = HKDF(SHA256(), 2 * KEY_BYTES, salt=sha256(greetings).digest(), info=b"pdserve control").derive(key + shared)
    first, second = ChaCha20Poly1305(made[:KEY_BYTES]), ChaCha20Poly1305(made[KEY_BYTES:])
    return _Ciphers(first, second) if dialled else _Ciphers(second, first)
