"""API keys: who a request is from, and whether that one may change what others see.

A key has a name, which goes where the key itself must not: into logs, into the namespaces of cached prefixes, and to
the instances behind a router. The admin key is no user's: it may do everything, and speak for a user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import scrypt, sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from ..trusted_path import read_secret
from .ports import is_loopback

if TYPE_CHECKING:  # every command reads options, and few of them serve
    from starlette.types import Scope

    from ..options import ServerOptions

KEY_NAME_HEADER = b"x-pdserve-key-name"
"""Whose request it is that a router passes on with the admin key in the place of its client's own."""
SCOPE_KEY = "pdserve.caller"
ADMIN = "(admin)"
"""What no user can be called."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
API_KEY_VARIABLE = "PDSERVE_API_KEY"
"""Where ``--api-key`` may stand. Only the process that reads options needs it."""
BEARER = b"bearer "
OTHER_HEADER = b"x-api-key"
"""Where Anthropic's clients have it."""


class KeyFileError(ValueError):
    """A key file that can't be used; the message says what to write instead."""


class Caller(NamedTuple):
    """Who sent a request: a key's name, "" where nobody is asked for one. ``is_admin``: may change what others see."""

    name: str
    is_admin: bool

    @staticmethod
    def of(scope: Scope) -> Caller:
        """The caller whose request ``scope`` is."""
        return cast(Caller, scope.get(SCOPE_KEY, ANYBODY))


ANYBODY = Caller("", is_admin=False)
"""A client without a key, where none is asked for: all of them are one user, and none is the admin."""


@dataclass(frozen=True)
class Keys:
    """The keys that a server takes; ``users``: by name. Without any, everybody is a user.

    Without an admin key, the holder of the only key is the admin: of several users none may flush what all have cached.
    ``own_admin``: the admin key that the server drew itself, where the options name no admin. It counts for nothing
    else: where no other key is given, the server asks for none.
    """

    users: dict[str, str]
    admin: str | None = None
    own_admin: str | None = None
    _by_digest: dict[bytes, Caller] = field(init=False, repr=False, compare=False)
    """Callers by the SHA-256 of their key: finding one takes the same time however many there are."""

    def __post_init__(self) -> None:
        only_key = self.admin is None and len(self.users) == 1
        callers = {_digest(key.encode()): Caller(user, is_admin=only_key) for user, key in self.users.items()}
        for key in (self.admin, self.own_admin):
            if key is not None:
                callers[_digest(key.encode())] = Caller(ADMIN, is_admin=True)
        object.__setattr__(self, "_by_digest", callers)

    def __bool__(self) -> bool:
        return bool(self.users or self.admin)

    @property
    def has_admin(self) -> bool:
        """Whether one of the keys that were given is an admin's."""
        return self.admin is not None or len(self.users) == 1

    def with_own_admin(self, key: str) -> Keys:
        """These keys, and the admin key that the server drew where it was given none."""
        return self if self.has_admin else replace(self, own_admin=key)

    @property
    def are_several(self) -> bool:
        """Whether requests may be of several users: the admin key is also how a router speaks for each of its own."""
        return len(self.users) > 1 or self.admin is not None

    def caller(self, headers: Iterable[tuple[bytes, bytes]], *, routers_sign: bool = False) -> Caller | None:
        """Whose key ``headers`` show; None: nobody's, where there has to be one.

        A name counts from whoever may do everything: it only takes from what its request may do. ``routers_sign``:
        routers show who they are by other means, so whoever shows no key is none.
        """
        given, speaks_for = b"", None
        for name, value in headers:
            if name == b"authorization" and value[: len(BEARER)].lower() == BEARER:
                given = value[len(BEARER) :]
            elif name == OTHER_HEADER:
                given = given or value
            elif name == KEY_NAME_HEADER:
                speaks_for = value.decode("latin-1")
        found = None if self.users else ANYBODY
        # What the time of this lookup tells is about digests, from which no key follows.
        if given:
            found = self._by_digest.get(_digest(given), found)
        # Where no key is asked for, whoever comes may be a router that asks for keys, and knows whose request it is.
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
    """The keys that ``options`` say. Raises ``KeyFileError``.

    A line of a file is a key, or a name and a key; the admin's file has one. What begins with # is a remark. For a key
    without a name see ``_digest_name``.
    """
    users: dict[str, str] = {}
    if options.api_key is not None:
        if not (options.api_key.isascii() and options.api_key.isprintable() and options.api_key.strip()):
            raise KeyFileError("--api-key can't travel in an HTTP header: use printable ASCII characters")
        users[_digest_name(options.api_key)] = options.api_key
    if options.api_key_file is not None:
        for line in read_key_lines("--api-key-file", options.api_key_file):
            name = line.name or _digest_name(line.key)
            if not NAME.fullmatch(name):
                raise line.error("a name has up to 64 letters, digits, dots, dashes and underscores")
            if name in users or line.key in users.values():
                raise line.error("this name or key was there before")
            users[name] = line.key
    admin = None
    if options.admin_key_file is not None:
        first, *more = read_key_lines("--admin-key-file", options.admin_key_file)
        if more or first.name:
            raise first.error("write nothing but the key")
        if first.key in users.values():
            raise first.error("this key is a user's too; choose another")
        admin = first.key
    return Keys(users, admin)


def check_keys(options: KeyOptions) -> None:
    """Raise ``KeyFileError`` for keys that can't be used, and where other hosts could use the server without any."""
    if not (read_keys(options).users or options.no_keys or is_loopback(options.host)):
        raise KeyFileError(
            f"--host {options.host} lets everybody who reaches it use this server: ask for keys (--api-key-file), "
            "or say --no-keys if nobody else reaches it"
        )


def caches_by_key(options: ServerOptions) -> bool:
    """Whether the cached prefixes of each key are kept apart: as ``--cache-by-key`` says, else for several users."""
    return read_keys(options).are_several if options.cache_by_key is None else options.cache_by_key


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


@cache
def _digest_name(key: str) -> str:
    """The name of a key that has none, in logs, in cached prefixes and as an owner of sessions.

    It depends on the key alone, so that it is the same at router and instances and after a restart, and so that nobody
    inherits sessions by moving up a line. Whoever sees it can try keys until one has this name: slowly (some 50 ms and
    16 MiB each), which also is what each such key costs at the start.
    """
    return "key-" + scrypt(key.encode(), salt=b"pdserve key name", n=2**14, r=8, p=1, dklen=4).hex()


class KeyLine(NamedTuple):
    """A line of a key file; ``name`` is "" where it has none. ``where`` begins an error about it."""

    where: str
    name: str
    key: str

    def error(self, message: str) -> KeyFileError:
        """What to raise where the line is no good."""
        return KeyFileError(f"{self.where}: {message}")


def read_key_lines(flag: str, file: str | Path, *, is_server: bool = True) -> list[KeyLine]:
    """The lines of ``file`` that say anything, at least one; ``flag`` named it. Raises ``KeyFileError``.

    ``is_server``: the keys are those that are accepted, so that nobody else may own the file.
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
