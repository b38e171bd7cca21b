"""Long texts in messages, as UTF-8.

Python stores every character of a text in 4 bytes if one of them is beyond U+FFFF. A process that only passes a text
on, lets it wait or refuses it for its length need not have it in that form.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

LONG_CHARACTERS = 1 << 16
"""Texts of more characters are packed, unless each takes a byte in any case."""


class PackedText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text in UTF-8, which may hold surrogates. Its length is in bytes."""

    utf8: bytes

    def __len__(self) -> int:
        return len(self.utf8)


Text = str | PackedText


def pack(text: str) -> Text:
    """Return ``text`` as it is sent: in UTF-8 if it is long and has characters beyond ASCII, else as it is."""
    if len(text) <= LONG_CHARACTERS or text.isascii():
        return text
    return PackedText(text.encode(errors="surrogatepass"))


def pack_joined(separator: str, texts: Sequence[str]) -> Text:
    """Return what ``pack`` returns for ``texts`` joined by ``separator``.

    They are not joined as a ``str`` if it is long. One text beyond U+FFFF would widen the characters of all others.
    """
    if sum(map(len, texts)) <= LONG_CHARACTERS or all(text.isascii() for text in texts):
        return pack(separator.join(texts))
    return PackedText(separator.encode().join(text.encode(errors="surrogatepass") for text in texts))


def unpack(text: Text) -> str:
    """Return a sent text as a ``str``; the reverse of ``pack``."""
    return text.utf8.decode(errors="surrogatepass") if isinstance(text, PackedText) else text
