"""API keys: the sender of a request, and whether it may change what other users see.

A key has a name. It stands for the key in logs, in the namespaces of cached prefixes, and in requests from a router to
its instances. The admin key belongs to no user. It permits everything, also to act for a user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import scrypt, sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from ...messages.error_codes import ADMIN_KEY
from ..trusted_path import read_secret
from .ports import is_loopback

if TYPE_CHECKING:  # every command reads options, and few of them serve
    from starlette.types import Scope


KEY_NAME_HEADER = b"x-pdserve-key-name"
"""Header with the name of the client's key, in a request that a router passes on with the admin key."""
SCOPE_KEY = "pdserve.caller"
ADMIN = ADMIN_KEY
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
API_KEY_VARIABLE = "PDSERVE_API_KEY"
"""Where ``--api-key`` may stand. Only the process that reads options needs it."""
BEARER = b"bearer "
OTHER_HEADER = b"x-api-key"
"""Where Anthropic's clients have it."""


class KeyFileError(ValueError):
    """A key file that can't be used; the message says what to write instead."""


class Caller(NamedTuple):
    """The sender of a request."""

    name: str
    """Name of its key; "" if the server asks for none."""
    is_admin: bool
    """Whether it may change what other users see."""

    @staticmethod
    def of(scope: Scope) -> Caller:
        """Return the sender of the request ``scope``; ``ANYBODY`` if no key was checked."""
        return cast(Caller, scope.get(SCOPE_KEY, ANYBODY))


ANYBODY = Caller("", is_admin=False)
"""A client without a key, where none is asked for: all of them are one user, and none is the admin."""


class _Unnamed:
    """A key without a name. Its caller is made when it is first used."""

    def __init__(self, key: str, *, is_admin: bool) -> None:
        self._key, self._is_admin = key, is_admin
        self.is_named = False

    @cached_property
    def caller(self) -> Caller:
        """The sender with this key. Making its name takes some 50 ms the first time."""
        caller = Caller(_digest_name(self._key), is_admin=self._is_admin)
        self.is_named = True
        return caller


@dataclass(frozen=True)
class Keys:
    """The keys that a server takes. Without any key, every client is a user.

    Without an admin key, the only key is the admin's. If there are several users, none of them may flush the cache of
    all.
    """

    users: dict[str, str]
    """Keys by name."""
    admin: str | None = None
    own_admin: str | None = None
    """Admin key that the server drew itself, because the options name no admin. If it is the only key, the server asks
    users for none.
    """
    unnamed: tuple[str, ...] = ()
    """Keys of users without a name."""
    _by_digest: dict[bytes, Caller | _Unnamed] = field(init=False, repr=False, compare=False)
    """Callers by the SHA-256 of their key. The time of a lookup does not depend on their number."""

    def __post_init__(self) -> None:
        callers: dict[bytes, Caller | _Unnamed] = {}
        is_admin = self.admin is None and self.has_admin
        for user, key in self.users.items():
            callers[_digest(key.encode())] = Caller(user, is_admin=is_admin)
        for key in self.unnamed:
            callers[_digest(key.encode())] = _Unnamed(key, is_admin=is_admin)
        for admin_key in (self.admin, self.own_admin):
            if admin_key is not None:
                callers[_digest(admin_key.encode())] = Caller(ADMIN, is_admin=True)
        object.__setattr__(self, "_by_digest", callers)

    def __bool__(self) -> bool:
        return bool(self.has_users or self.admin)

    @property
    def has_users(self) -> bool:
        """Whether a key of a user is given, so that every client is asked for one."""
        return bool(self.users or self.unnamed)

    @property
    def has_admin(self) -> bool:
        """Whether the options gave an admin key, or a single key, which is then also the admin's."""
        return self.admin is not None or len(self.users) + len(self.unnamed) == 1

    def with_own_admin(self, key: str) -> Keys:
        """Return these keys with the server's own admin key, unless there is an admin among them."""
        return self if self.has_admin else replace(self, own_admin=key)

    @property
    def are_several(self) -> bool:
        """Whether there may be several users: several keys, or a router that names its users with the admin key."""
        return len(self.users) + len(self.unnamed) > 1 or self.admin is not None

    def takes_long(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether ``caller`` has to make a name for the key in ``headers`` first, in some 50 ms."""
        if not self.unnamed:
            return False
        found = self._by_digest.get(_digest(_shown(headers)[0]))
        return isinstance(found, _Unnamed) and not found.is_named

    def caller(self, headers: Iterable[tuple[bytes, bytes]], *, routers_sign: bool = False) -> Caller | None:
        """Return the sender by the key in ``headers``; None if a key is required and there is no valid one.

        A router may name the user that it passes the request on for. It needs the admin key for that, or no key if the
        server asks for none. ``routers_sign``: routers sign their requests instead, so one without a key is not a
        router's.
        """
        given, speaks_for = _shown(headers)
        found = None if self.has_users else ANYBODY
        # The time of this lookup only reveals something about digests, from which no key follows.
        if given and (known := self._by_digest.get(_digest(given))) is not None:
            found = known.caller if isinstance(known, _Unnamed) else known
        # If no key is asked for, the sender may be a router that has checked the client's key and names it.
        speaker = ANYBODY if self.admin is None else Caller(ADMIN, is_admin=True)
        if speaks_for is not None and found == speaker and not (routers_sign and found is ANYBODY):
            return Caller(speaks_for if NAME.fullmatch(speaks_for) else "", is_admin=False)
        return found


class KeyOptions(Protocol):
    """The options of a server that say which keys it takes, and where it listens."""

    @property
    def host(self) -> str: ...
    @property
    def no_keys(self) -> bool: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def api_key_file(self) -> str | None: ...
    @property
    def admin_key_file(self) -> str | None: ...


def read_keys(options: KeyOptions) -> Keys:
    """Read the keys of ``options``. Raises ``KeyFileError``.

    A line of a file is a key, or a name and a key. The admin's file has one. A line that begins with # is a comment.
    ``_digest_name`` names a key without a name.
    """
    users: dict[str, str] = {}
    unnamed: list[str] = []
    known: set[str] = set()
    if options.api_key is not None:
        if not (options.api_key.isascii() and options.api_key.isprintable() and options.api_key.strip()):
            raise KeyFileError("--api-key can't travel in an HTTP header: use printable ASCII characters")
        unnamed.append(options.api_key)
        known.add(options.api_key)
    if options.api_key_file is not None:
        for line in read_key_lines("--api-key-file", options.api_key_file):
            if line.name and not NAME.fullmatch(line.name):
                raise line.error("a name has up to 64 letters, digits, dots, dashes and underscores")
            if line.name in users or line.key in known:
                raise line.error("this name or key was there before")
            known.add(line.key)
            if line.name:
                users[line.name] = line.key
            else:
                unnamed.append(line.key)
    admin = None
    if options.admin_key_file is not None:
        first, *more = read_key_lines("--admin-key-file", options.admin_key_file)
        if more or first.name:
            raise first.error("write nothing but the key")
        if first.key in known:
            raise first.error("this key is a user's too; choose another")
        admin = first.key
    return Keys(users, admin, unnamed=tuple(unnamed))


def check_keys(options: KeyOptions) -> None:
    """Raise ``KeyFileError`` for keys that can't be used, and if other hosts could use the server without a key.

    ``--no-keys`` allows the latter.
    """
    if not (read_keys(options).has_users or options.no_keys or is_loopback(options.host)):
        raise KeyFileError(
            f"--host {options.host} lets every client that reaches it use this server: ask for keys (--api-key-file), "
            "or say --no-keys if no other client reaches it"
        )


class CacheKeyOptions(KeyOptions, Protocol):
    """The options of a server about its keys and the cached prefixes of each key."""

    @property
    def cache_by_key(self) -> bool | None: ...


def caches_by_key(options: CacheKeyOptions) -> bool:
    """Return whether cached prefixes are separate for each key: as ``--cache-by-key`` says, else for several users."""
    return read_keys(options).are_several if options.cache_by_key is None else options.cache_by_key


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


@cache
def _digest_name(key: str) -> str:
    """Make a name for a key without one, for logs, cached prefixes and the owners of sessions.

    It depends only on the key. So it is the same at router and instances and after a restart. No key inherits sessions
    when a line of the file is removed. An attacker that sees the name can try keys, but each takes some 50 ms and
    16 MiB.

    A server pays that price when a key is first used, once for each process and key. At the start, 1,000 such keys
    would hold up each process by 50 s. Other ways to save them were not taken:

    - One scrypt for the whole file and a quick HMAC for each key. If the scrypt depends on no key, a guess is as quick
      as an HMAC. If it depends on all of them, a new line changes all names.
    - A salt for each file. Router and instances, which may have files of their own, would disagree about names.
    - Names that are derived once and passed on to child processes. The start is still held up once, and an instance on
      another host has no such parent.

    The name has 64 bits: not all names are known when the file is read, so equal ones could not be refused then.
    """
    return "key-" + scrypt(key.encode(), salt=b"pdserve key name", n=2**14, r=8, p=1, dklen=8).hex()


def shown_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the API key in ``headers``, which is not checked; b"" if there is none."""
    return _shown(headers)[0]


def _shown(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, str | None]:
    """Return the API key in ``headers``, and the name of the user that a router passes the request on for.

    The key is not checked. It is b"" if there is none. The name is None if the headers have none.
    """
    given, speaks_for = b"", None
    for name, value in headers:
        if name == b"authorization" and value[: len(BEARER)].lower() == BEARER:
            given = value[len(BEARER) :]
        elif name == OTHER_HEADER:
            given = given or value
        elif name == KEY_NAME_HEADER:
            speaks_for = value.decode("latin-1")
    return given, speaks_for


class KeyLine(NamedTuple):
    """A line of a key file; ``name`` is "" where it has none. ``where`` begins an error about it."""

    where: str
    name: str
    key: str

    def error(self, message: str) -> KeyFileError:
        """Make, but do not raise, the error for this line; ``message`` comes after the line's file and number."""
        return KeyFileError(f"{self.where}: {message}")


def read_key_lines(flag: str, file: str | Path, *, is_server: bool = True) -> list[KeyLine]:
    """Read the lines of ``file`` that have keys, at least one; ``flag`` is its option. Raises ``KeyFileError``.

    With ``is_server``, the server accepts these keys, so the file must not belong to another user.
    """
    try:
        text = (read_secret(file) if is_server else Path(file).expanduser().read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as e:
        raise KeyFileError(f"{flag} {file} can't be read: {e}") from e
    found = []
    for number, content in enumerate(text.splitlines(), 1):
        words = content.split()
        if not words or words[0].startswith("#"):
            continue
        line = KeyLine(f"{flag} {file}, line {number}", words[0] if len(words) == 2 else "", words[-1])
        if len(words) > 2 or not (line.key.isascii() and line.key.isprintable()):
            raise line.error("write a key, or a name and a key, in printable ASCII characters")
        found.append(line)
    if not found:
        raise KeyFileError(f"{flag} {file} has no key: write one a line")
    return found
