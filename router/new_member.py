"""An instance as it is named to a running router: by a request or by a line of a file."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from .instance import Role
from .options import check_url

MAX_URL_CHARS = 2048
ROLES = {role.value: role for role in Role}


class Place(NamedTuple):
    """The address of an instance that is to be added, and its role if that is known."""

    url: str
    role: Role | None
    bootstrap_port: int | None


class NewMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """JSON object that names an instance."""

    url: str
    role: str | None = None
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None

    def place(self) -> Place:
        """Check the fields, and return what they say. Raises ``ValueError`` with the name of the field."""
        role = None if self.role is None else ROLES.get(self.role)
        if self.role is not None and role is None:
            raise ValueError(f"role: is none of {', '.join(ROLES)}: {self.role[:60]!r}")
        if self.bootstrap_port is not None and role not in (None, Role.PREFILL):
            raise ValueError(f"bootstrap_port: a {role} has none; only prefills are asked for KV")
        return Place(checked_url(self.url), role, self.bootstrap_port)


def checked_url(url: str) -> str:
    """Return an instance's URL without a trailing slash. Raises ``ValueError`` with the name of the field."""
    if len(url) > MAX_URL_CHARS:
        raise ValueError(f"url: has {len(url)} characters, the limit is {MAX_URL_CHARS}")
    try:
        return check_url(url)
    except ValueError as exc:
        raise ValueError(f"url: {exc}") from None
