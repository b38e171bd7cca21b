"""Keys of answers that go on at another instance: drawn by its scheduler, recognised by its HTTP process."""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = MAC_BYTES = 16


class AnswerKeys:
    """Draws keys, and tells at once those that it or another process with the same ``secret`` drew from all others.

    So nobody has to wait for an answer that may yet come, because a key that was made up is known to be one.
    """

    def __init__(self, secret: str | None = None) -> None:
        self._secret = (secret or secrets.token_hex()).encode()

    def draw(self) -> str:
        """A new key: 64 hexadecimal digits."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return (nonce + self._mac(nonce)).hex()

    def is_genuine(self, key: str) -> bool:
        """Whether ``draw`` made this key."""
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            return False
        return hmac.compare_digest(raw[NONCE_BYTES:], self._mac(raw[:NONCE_BYTES]))

    def _mac(self, nonce: bytes) -> bytes:
        return hmac.digest(self._secret, b"moved answer\0" + nonce, "sha256")[:MAC_BYTES]
