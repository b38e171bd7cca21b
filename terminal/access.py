"""Address and API key of a running server, as options of the commands in this folder."""

from __future__ import annotations

from pathlib import Path

from ..messages.decode import UndeclaredMessage, shown
from ..router.options import RouterOptionsError, check_url
from ..runtime.web.keys import KeyFileError, read_key_lines

KEY_FLAG = "--api-key-file"


class AccessError(ValueError):
    """An option that can't work; the message says what to write instead."""


def check_server_url(url: str) -> str:
    """Return ``url`` without a trailing slash; raises ``AccessError`` if it is not a server's URL."""
    try:
        return check_url(url)
    except RouterOptionsError as e:
        raise AccessError(f"--url: {e}") from None


def read_api_key(file: Path | None) -> str | None:
    """Read the first key of ``file``, which may be a server's key file; None without a file. Raises ``AccessError``.

    There is no option for the key itself: every user of the host can read a process's arguments.
    """
    if file is None:
        return None
    try:
        return read_key_lines(KEY_FLAG, file, is_server=False)[0].key
    except KeyFileError as e:
        raise AccessError(str(e)) from None


def key_headers(api_key: str | None) -> dict[str, str]:
    """Return the HTTP headers that carry ``api_key``, an empty dict if it is None."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def decoder_says(error: UndeclaredMessage) -> str:
    """Return the decoder's description of what is wrong with an answer, in printable characters."""
    return shown(str(error.__cause__ or error))
