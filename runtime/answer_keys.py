"""Keys of answers that go on at another instance: drawn by its scheduler, recognised by its HTTP process."""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = MAC_BYTES = 16


class AnswerKeys:
    """Maker of keys that it can recognize, also those of another process with the same ``secret``.

    So an invented key is refused at once, and no client waits for an answer that never comes.
    """

    def __init__(self, secret: str | None = None) -> None:
        self._secret = (secret or secrets.token_hex()).encode()

    def draw(self) -> str:
        """Draw a new key: 64 hexadecimal digits.

        With it, the rest of an answer that moves to this instance can be fetched here.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        return (nonce + self._mac(nonce)).hex()

    def is_genuine(self, key: str) -> bool:
        """Return whether ``draw`` made this key, here or in a process with the same secret."""
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            return False
        return hmac.compare_digest(raw[NONCE_BYTES:], self._mac(raw[:NONCE_BYTES]))

    def _mac(self, nonce: bytes) -> bytes:
        return hmac.digest(self._secret, b"moved answer\0" + nonce, "sha256")[:MAC_BYTES]
