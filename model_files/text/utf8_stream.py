"""UTF-8 that arrives in pieces: characters come out when they are complete."""

from __future__ import annotations

import codecs
from typing import NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The first two bytes of the lowest surrogate; UTF-8 has none of U+D800 to U+DFFF.
SURROGATE = b"\xed\xa0"
PER_SEQUENCE = "replace"
"""Error handler that shows one U+FFFD for the longest beginning of a character, as the Unicode standard recommends."""
PER_BYTE = "pdserve-replace-each-byte"
"""Error handler that shows one U+FFFD for each byte that is part of no character, as SentencePiece does."""


class DecodedBytes(NamedTuple):
    """``text`` is certain. ``rest`` are up to three bytes that more bytes may complete."""

    text: str
    rest: bytes


def decode_utf8(data: bytes, errors: str) -> DecodedBytes:
    """Decode as much of ``data`` as is certain, and return it with the bytes left over.

    ``errors``: name of the codec error handler for bytes that are no UTF-8, such as ``PER_BYTE``.
    """
    text, used = codecs.utf_8_decode(data, errors, False)
    rest = data[used:]
    if rest >= SURROGATE and rest < b"\xee":
        # Python waits for a surrogate's third byte, though no third byte makes a character of it.
        return DecodedBytes(text + rest.decode(errors=errors), b"")
    return DecodedBytes(text, rest)


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), "only decoding uses this handler"
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(PER_BYTE, _replace_each)
