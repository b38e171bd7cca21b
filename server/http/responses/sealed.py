"""Reasoning as ``encrypted_content``, for clients that send back this field of a reasoning item and no other.

It is the text in base64 and not a secret: the same item shows the text. A server that keeps nothing reads it again.
"""

from __future__ import annotations

from base64 import b64decode, b64encode

MARK = "pdserve:"
"""Beginning of what this server has sealed. What other servers have is of no use here."""


def seal(text: str) -> str:
    """Return ``text`` as ``encrypted_content``."""
    return MARK + b64encode(text.encode(errors="surrogatepass")).decode("ascii")


def unseal(sealed: str) -> str:
    """Return the text in ``sealed``, "" if another server has made it."""
    if not sealed.startswith(MARK):
        return ""
    try:
        return b64decode(sealed.removeprefix(MARK), validate=True).decode()
    except ValueError:
        return ""
